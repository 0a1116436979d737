"""The exceptions a user can meet, in one tree.

RedlineError
+-- UsageError             exit code 2: the command line or a config file asks for something impossible
|   +-- ConfigError        an option, a combination of options, or a TOML key
+-- DataError              exit code 1: .bin/.idx files, corpora, tokenizers
+-- CheckpointError        exit code 1: a checkpoint that cannot be read, written or used for this model
+-- TrainingError          exit code 1: NaN or Inf that was asked to stop the run, out of memory
+-- ShapeError             exit code 1: a tensor of the wrong shape or dtype at a room's border

Each carries what is wrong, why it is so, and how to mend it. `assert` is for our own bugs only.
"""

from __future__ import annotations


class RedlineError(Exception):
    """An error the user can mend; printed without a traceback.

    Args:
        what: one sentence that names the flag or file, with the values as typed.
        why: the reason, one sentence, or "".
        mend: what to change, one sentence, or "".
    """

    exit_code = 1
    everywhere = False  # every rank of the run raises this one error, so that one of them tells it

    def __init__(self, what: str, why: str = "", mend: str = "") -> None:
        super().__init__(what, why, mend)
        self.what, self.why, self.mend = what, why, mend

    def __str__(self) -> str:
        lines = [f"{type(self).__name__}: {self.what}"]
        if self.why:
            lines.append(f"  why:  {self.why}")
        if self.mend:
            lines.append(f"  mend: {self.mend}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: many have more, some (a bare `assert`, MemoryError) only a type."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


class UsageError(RedlineError):
    """The command line cannot be obeyed."""

    exit_code = 2


class ConfigError(UsageError):
    """An option or a combination of options cannot be obeyed."""


class DataError(RedlineError):
    """A data file or corpus is missing, truncated, empty or does not fit the model."""


class CheckpointError(RedlineError):
    """A checkpoint cannot be read, written, or used for this model."""


class TrainingError(RedlineError):
    """Training had to stop: a non-finite loss or gradient, or no memory left."""


class ShapeError(RedlineError):
    """A tensor at a room's border has the wrong shape or dtype."""
