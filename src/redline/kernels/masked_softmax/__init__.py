"""Scale + mask + softmax of materialised attention scores."""

from redline.kernels.masked_softmax.op import masked_softmax, supports

__all__ = ["masked_softmax", "supports"]
