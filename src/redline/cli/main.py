"""`redline COMMAND ...`: finds the command, runs it, and turns a user's mistake into one paragraph.

Commands are imported only when they run, so that help and torch-free commands answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import redline
from redline.errors import RedlineError, UsageError

# name -> (module with `main(argv) -> exit code`, one line of help)
COMMANDS = {
    "train": ("redline.cli.train", "train a model; with no arguments, the demo"),
    "memory": ("redline.cli.memory", "theoretical memory, parameters and FLOPs of a configuration"),
    "data": ("redline.cli.data", "prepare text, JSONL or Parquet for training; inspect prepared data"),
    "bench": ("redline.cli.bench", "measure this machine: whole training steps, index building"),
}


def usage() -> str:
    """The top-level help."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "Redline pre-trains transformer language models and accounts for every FLOP it could not use.",
            "",
            "usage: redline COMMAND [arguments]    redline COMMAND --help    redline --version",
            "",
            *lines,
        ]
    )


def run_command(argv: Sequence[str]) -> int:
    """Run `redline` with these arguments; returns the exit code, raises RedlineError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"redline {redline.__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(
            f"there is no command {name!r}.",
            why=f"the commands are {', '.join(COMMANDS)}.",
            mend=f"did you mean `redline {near[0]}`?" if near else "see `redline --help`.",
        )
    module = importlib.import_module(COMMANDS[name][0])
    code: int = module.main(rest)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point: exit code 0, 1 (failure), 2 (usage) or 130 (interrupted)."""
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    except RedlineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away; keep the interpreter from complaining about stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
