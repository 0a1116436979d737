"""fp8: casts that also transpose and find the largest value, norms and activations that end in fp8, GEMMs."""

from redline.kernels.fp8.block_op import block_cast, block_gemm, square_cast
from redline.kernels.fp8.op import (
    activation_cast,
    activation_cast_backward,
    add_wgrad,
    cast,
    gemm,
    gemm_into,
    norm_cast,
    transpose,
)
from redline.kernels.fp8.reference import FP8_CUT, FP8_MAX, GEMM_MULTIPLE, quantize

__all__ = [
    "FP8_CUT",
    "FP8_MAX",
    "GEMM_MULTIPLE",
    "activation_cast",
    "activation_cast_backward",
    "add_wgrad",
    "block_cast",
    "block_gemm",
    "cast",
    "gemm",
    "gemm_into",
    "norm_cast",
    "quantize",
    "square_cast",
    "transpose",
]
