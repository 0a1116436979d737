"""Bias + SwiGLU: the gated activation between fc1 and fc2."""

from redline.kernels.bias_swiglu.op import bias_swiglu, supports

__all__ = ["bias_swiglu", "supports"]
