"""Whether Triton's interpreter, which runs kernels on a CPU, computes here what a GPU would."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (a @triton.jit function is not Python: its arguments have Triton's types)

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

SUMMANDS = (1.0, 0.5 * 2**-7, 0.25 * 2**-7)  # the nearest bf16 lies above their sum, the truncated one below


@triton.jit
def _probe_kernel(x_ptr, out_ptr, count):
    """The sum of x, in the dtype of out: a loop up to a scalar, as most reductions have, and one rounding."""
    total = 0.0
    for index in range(count):
        total += tl.load(x_ptr + index)
    tl.store(out_ptr, total)


def why_not_interpreted() -> str | None:
    """Why kernels must not run interpreted, or None. Asked where Triton interprets, on a CPU."""
    x = torch.tensor(SUMMANDS)
    out = torch.zeros(1, dtype=torch.bfloat16)
    try:
        _probe_kernel[(1,)](x, out, len(x))
    except Exception as error:  # it wraps whatever went wrong inside, in an error of its own
        fault = f"cannot loop up to a scalar: {error.__cause__ or error}"
    else:
        if torch.equal(out, x.sum(0, keepdim=True).bfloat16()):
            return None
        fault = "truncates to bf16 where a GPU rounds"
    return (
        f"the run is on a CPU, and Triton's interpreter, which TRITON_INTERPRET asks for there, {fault} "
        f"(Triton {triton.__version__}, NumPy {np.__version__}); Redline's tests mend it, a run does not"
    )
