"""`redline train [CONFIG.toml] [--flags]`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from redline.config import format_help, parse_args, read_environment, to_toml
from redline.errors import ConfigError, RedlineError


def main(argv: Sequence[str]) -> int:
    """Train, or print the help or the resolved configuration."""
    started = time.perf_counter()  # loading PyTorch is a part of the run's time
    words = list(argv)
    if "-h" in words or "--help" in words or "--help-all" in words:
        print(format_help(short="--help-all" not in words))
        return 0
    prints = "--print-config" in words
    try:
        parsed = parse_args([word for word in words if word != "--print-config"])
    except RedlineError as error:
        error.everywhere = True  # all ranks were given the same words
        raise
    if prints:
        for notice in parsed.notices:
            print(notice, file=sys.stderr)
        print(to_toml(parsed.config), end="")
        return 0

    runtime, environment = parsed.config.runtime, read_environment()
    if environment.launched and runtime.nproc_per_node not in (None, environment.local_world_size):
        raise _started_already(runtime.nproc_per_node, environment.local_world_size)
    if runtime.nproc_per_node is not None and not environment.launched:
        from redline.comm.elastic import launch

        if runtime.max_restarts and parsed.config.checkpoint.save is None:
            from redline.run.folder import name_run  # every attempt goes on in this folder

            words += ["--save", str(name_run(parsed.config.model.preset or "run"))]

        return launch(
            ["train", *words], nproc_per_node=runtime.nproc_per_node, max_restarts=runtime.max_restarts
        )

    from redline.cli.console import ReportConsole
    from redline.comm.elastic import ended_well
    from redline.report import print_summary
    from redline.run import run

    summary = run(parsed, started)
    if summary is not None:
        print_summary(summary, ReportConsole())
    ended_well(environment)
    return 0


def _started_already(asked: int | None, there: int) -> ConfigError:
    error = ConfigError(
        f"--nproc-per-node {asked} does not fit the {there} processes that were started here.",
        why="torchrun or Slurm has started them.",
        mend="leave it out, or start without them.",
    )
    error.everywhere = True
    return error
