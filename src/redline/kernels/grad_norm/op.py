"""Global norm of the gradients, and what is wrong with them, in one read of the flat buffers.

    statistics = grad_statistics(buffers)      # float64 [3]; one all-reduce (SUM) over ranks completes it
    norm = statistics[0].sqrt()

Nothing waits for the device. A non-finite element makes the norm non-finite and is counted beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.kernels.common import Impl, lazily, operator, require, use_triton, why_not
from redline.kernels.grad_norm.reference import grad_statistics_reference


def supports(grads: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot read these tensors, or None."""
    return why_not(*grads)


def grad_statistics(grads: Sequence[Tensor], *, impl: Impl = "auto") -> Tensor:
    """[sum of squares, number of non-finite elements, number of non-zero elements] over all tensors.

    Args:
        grads: one or more contiguous tensors of any shape on one device; fp32, bf16, fp16 (fp64 by the
            reference).

    Returns: float64 [3] on that device; the same bits for the same buffers, run to run.
    Raises: ShapeError without a tensor or on one not contiguous, ConfigError when impl="triton" cannot run.
    """
    require(len(grads) > 0, "grad_norm needs a gradient to measure.")
    require(all(grad.is_contiguous() for grad in grads), "grad_norm takes contiguous buffers.")
    if not use_triton("grad_norm", impl, supports(grads)):
        return grad_statistics_reference(grads)
    statistics: Tensor = _statistics(list(grads))
    return statistics


def _fake(grads: list[Tensor]) -> Tensor:
    return torch.empty(3, dtype=torch.float64, device=grads[0].device)


_statistics = operator(
    "grad_statistics(Tensor[] grads) -> Tensor",
    lazily("redline.kernels.grad_norm.kernel", "statistics"),
    _fake,
)
