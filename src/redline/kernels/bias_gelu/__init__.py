"""Bias + GELU: the activation between fc1 and fc2 of a plain MLP."""

from redline.kernels.bias_gelu.op import bias_gelu, supports

__all__ = ["bias_gelu", "supports"]
