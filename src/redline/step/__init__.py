"""One optimizer step, evaluation, the loop around them, and the state they change."""

from redline.step.evaluate import Evaluation, evaluate
from redline.step.loop import FINISHED, Action, train
from redline.step.state import TrainState, returned_in
from redline.step.stop import SignalWatch, StopConditions
from redline.step.train_step import StepOutcome, TrainStep

__all__ = [
    "FINISHED",
    "Action",
    "Evaluation",
    "SignalWatch",
    "StepOutcome",
    "StopConditions",
    "TrainState",
    "TrainStep",
    "evaluate",
    "returned_in",
    "train",
]
