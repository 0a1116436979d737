"""Which sizes a GEMM in fp8 takes: one table, for who plans its sites and who casts its operands."""

from __future__ import annotations

# By recipe, of both sizes of an operand that are summed over or stored contiguously. Tokens are padded to it,
# a weight of another size stays in bf16.
FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
