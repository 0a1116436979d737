"""Normalisation of each query and key head, on views of the merged projection."""

from redline.kernels.qk_norm.op import qk_norm, supports
from redline.kernels.qk_norm.reference import QKNormParams

__all__ = ["QKNormParams", "qk_norm", "supports"]
