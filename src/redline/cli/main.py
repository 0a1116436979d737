"""`redline COMMAND ...`: finds the command, runs it, and turns a user's mistake into one paragraph.

Commands are imported only when they run, so that help and torch-free commands answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redline
from redline.errors import RedlineError, UsageError
from redline.files import discard, refusal

# name -> (module with `main(argv) -> exit code`, one line of help)
COMMANDS = {
    "train": ("redline.cli.train", "train a model; with no arguments, a demo of two to three minutes"),
    "memory": ("redline.cli.memory", "parameters, FLOPs and predicted memory of a configuration"),
    "data": ("redline.cli.data", "prepare text, JSONL or Parquet for training; inspect prepared data"),
    "doctor": ("redline.cli.doctor", "why a training job is slow, and what to change"),
    "ledger": (
        "redline.cli.ledger",
        "where the time of a profiled step went: of a run, or of any PyTorch trace",
    ),
    "report": ("redline.cli.report", "one HTML page of a run, or of several side by side"),
    "bench": ("redline.cli.bench", "measure this machine: training steps, fused operators, index building"),
}
EXAMPLES = """\
examples:
  redline train
  redline data prepare corpus/ --train-tokenizer 16384 --output-prefix data/mine
  redline train --num-layers 8 --hidden-size 512 --num-attention-heads 8 --swiglu --train-iters 2000 \\
      --data-path data/mine_text_document --save runs/mine"""

INTERRUPTED, TERMINATED = 130, 143  # as a shell reports a process that ended by the signal


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, so that what was written half is removed on the way out."""


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
            "",
            EXAMPLES,
        ]
    )


def run_command(argv: Sequence[str]) -> int:
    """Run `redline` with these arguments; returns the exit code, raises RedlineError."""
    name, *rest = argv or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"redline {redline.__version__}")
        return 0
    if name not in COMMANDS:
        raise _no_command(name, argv)
    module = importlib.import_module(COMMANDS[name][0])
    code: int = module.main(rest)
    return code


def _no_command(name: str, argv: Sequence[str]) -> UsageError:
    why = f"the commands are {', '.join(COMMANDS)}."
    if name.startswith("-") or name.endswith(".toml"):
        what = f"{name} stands where a command is expected."
        return UsageError(what, why, f"did you mean `redline train {shlex.join(argv)}`?")
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    mend = f"did you mean `redline {near[0]}`?" if near else "see `redline --help`."
    return UsageError(f"there is no command {name!r}.", why, mend)


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point: exit code 0, 1 (failure), 2 (usage), 130 (SIGINT) or 143 (SIGTERM)."""
    _open_closed_streams()
    try:
        with _terminable():
            code = run_command(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
    except RedlineError as error:
        if not error.everywhere or _leads():
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        print("terminated" if isinstance(stopped, Terminated) else "interrupted", file=sys.stderr)
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)  # or the interpreter complains at exit
        return 0
    except OSError as error:  # no room foresaw it: mostly stdout, on a full disk
        print(refusal(RedlineError, error, f"use {error.filename or 'the output'}"), file=sys.stderr)
        if not error.filename:
            discard(sys.stdout)
        return RedlineError.exit_code


def _leads() -> bool:
    """Whether this process is the first rank of its run."""
    from redline.config import read_environment

    try:
        return read_environment().rank == 0
    except RedlineError:
        return True


def _open_closed_streams() -> None:
    """A process started with stdout or stderr closed (`>&-`) has None there; what it prints goes nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM raises Terminated, unless the process was told to treat it otherwise."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
