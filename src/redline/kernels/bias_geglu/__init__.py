"""Bias + GEGLU (also quick-GEGLU): the gated activation between fc1 and fc2."""

from redline.kernels.bias_geglu.op import bias_geglu, supports

__all__ = ["bias_geglu", "supports"]
