"""Flat parameter storage and the optimizer step on it."""

from redline.optim.adam import AdamW
from redline.optim.adam_options import AdamImpl, AdamOptions, Step
from redline.optim.adam_torch import adamw_reference
from redline.optim.buffer import Kind, Sharding
from redline.optim.data_parallel import DataParallel
from redline.optim.flat import Away, FlatBuffers
from redline.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScale, make_loss_scale
from redline.optim.nonfinite import NonFinite, NonFiniteAction
from redline.optim.optimizer import Optimizer, StepResult
from redline.optim.pieces import Pieces
from redline.optim.shared import SharedParameters

__all__ = [
    "SharedParameters",
    "AdamImpl",
    "AdamOptions",
    "AdamW",
    "Away",
    "ConstantLossScale",
    "DataParallel",
    "DynamicLossScale",
    "FlatBuffers",
    "Kind",
    "LossScale",
    "NonFinite",
    "NonFiniteAction",
    "Optimizer",
    "Pieces",
    "Sharding",
    "Step",
    "StepResult",
    "adamw_reference",
    "make_loss_scale",
]
