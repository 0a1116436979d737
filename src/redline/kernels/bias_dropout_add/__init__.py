"""Bias + dropout + residual addition, with a mask that is drawn twice and stored never."""

from redline.kernels.bias_dropout_add.op import bias_dropout_add, supports
from redline.kernels.bias_dropout_add.reference import DropoutKey

__all__ = ["DropoutKey", "bias_dropout_add", "supports"]
