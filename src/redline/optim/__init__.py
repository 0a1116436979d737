"""Flat parameter storage and the optimizer step on it."""

from redline.optim.adam import AdamImpl, AdamOptions, AdamW, adamw_reference
from redline.optim.data_parallel import DataParallel
from redline.optim.flat import FlatBuffers, Kind, Sharding
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
    "StepResult",
    "adamw_reference",
    "make_loss_scale",
]
