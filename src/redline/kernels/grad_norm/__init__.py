"""Global gradient norm and counts of non-finite and non-zero elements."""

from redline.kernels.grad_norm.op import grad_statistics, supports

__all__ = ["grad_statistics", "supports"]
