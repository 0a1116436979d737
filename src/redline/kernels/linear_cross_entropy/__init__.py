"""Projection to the vocabulary and cross-entropy in chunks: the logits never exist whole."""

from redline.kernels.linear_cross_entropy.op import linear_cross_entropy, supports
from redline.kernels.linear_cross_entropy.products import HeadProducts
from redline.kernels.loss_spec import LossSpec

__all__ = ["HeadProducts", "LossSpec", "linear_cross_entropy", "supports"]
