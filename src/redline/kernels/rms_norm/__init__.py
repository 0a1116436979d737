"""RMSNorm, alone and with the residual addition before it."""

from redline.kernels.rms_norm.op import _backward as rms_norm_backward
from redline.kernels.rms_norm.op import add_rms_norm, rms_norm, supports

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward", "supports"]
