"""The spine: a run from its options to its summary."""

from redline.run.opening import OpenRun, open_run
from redline.run.ranks import choose_backend
from redline.run.spine import run, train_opened

__all__ = ["OpenRun", "choose_backend", "open_run", "run", "train_opened"]
