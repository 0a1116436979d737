"""LayerNorm, alone and with the residual addition before it."""

from redline.kernels.layer_norm.op import _backward as layer_norm_backward
from redline.kernels.layer_norm.op import add_layer_norm, layer_norm, supports

__all__ = ["add_layer_norm", "layer_norm", "layer_norm_backward", "supports"]
