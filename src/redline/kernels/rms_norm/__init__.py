"""RMSNorm, alone and with the residual addition before it."""

from redline.kernels.rms_norm.op import add_rms_norm, rms_norm, supports

__all__ = ["add_rms_norm", "rms_norm", "supports"]
