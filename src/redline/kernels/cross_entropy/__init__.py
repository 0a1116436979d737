"""Cross-entropy over the true vocabulary, whole or split between ranks."""

from redline.kernels.cross_entropy.op import VocabShard, cross_entropy, supports
from redline.kernels.loss_spec import LossSpec

__all__ = ["LossSpec", "VocabShard", "cross_entropy", "supports"]
