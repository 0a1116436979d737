"""Which sizes a GEMM in fp8 takes, and casts of its weight: for who plans sites and who casts for them."""

from __future__ import annotations

from typing import Literal

# By recipe, of both sizes of an operand that are summed over or stored contiguously. Tokens are padded to it,
# a weight of another size stays in bf16.
FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}

Copies = Literal[0, 1, 2]  # fp8 casts of a weight that are kept through a step
