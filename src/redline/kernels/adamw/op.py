"""One AdamW step over a flat buffer in one pass: clipping, skip, per-segment hyperparameters, write-back.

    hyper = adamw_hyper(step=t, lr=[lr], weight_decay=[wd], beta1=0.9, beta2=0.95, eps=1e-8, device=device)
    adamw_(FlatState(param, grad, exp_avg, exp_avg_sq, main), hyper, grad_factor=clip, found_inf=flag)

Everything that changes from step to step is read from the device, so no step waits for the host and none
compiles anew. The storage dtypes are those of the tensors; bf16 parameter + int16 remainder + bf16 moments +
fp32 gradient are 12 bytes an element, and 10.06 with moments in 8 bits (codes.py). Each element, or block of
64 in 8 bits, is computed by itself: bitwise the same run to run, and however the buffer is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from redline.errors import ShapeError
from redline.formulas.state import CODE_BLOCK
from redline.kernels.adamw.codes import WORD, salt_of
from redline.kernels.adamw.reference import (
    BLOCK,
    FlatState,
    Hyper,
    Segments,
    adamw_reference,
    join_main,
    split_main,
)
from redline.kernels.common import (
    FUSED_DTYPES,
    Impl,
    lazily,
    no_kernel_for,
    operator,
    require,
    use_triton,
    why_not_on,
)

__all__ = [
    "FlatState",
    "Hyper",
    "Segments",
    "adamw_",
    "adamw_hyper",
    "join_main",
    "make_segments",
    "split_main",
    "supports",
]


def adamw_hyper(
    *,
    step: int | Tensor,
    lr: Sequence[float | Tensor],
    weight_decay: Sequence[float | Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    device: torch.device | str,
) -> Hyper:
    """Pack a step's hyperparameters; `step` counts from 1, lr and weight_decay have an entry a group.

    Host numbers go over in one small copy. Where any is a 0-d tensor on the device (a captured graph), all is
    computed there, in float64 as on the host.

    Raises: ShapeError where lr and weight_decay differ in length.
    """
    require(len(lr) == len(weight_decay), "adamw: one lr and one weight decay a group.")
    pairs = [value for pair in zip(lr, weight_decay, strict=True) for value in pair]
    if isinstance(step, Tensor) or any(isinstance(value, Tensor) for value in pairs):
        t = torch.as_tensor(step, dtype=torch.float64, device=device)
        inverse = [1.0 / (1.0 - torch.pow(beta, t)) for beta in (beta1, beta2)]
        salt = (t.long() * salt_of(1) & WORD).double()
        given = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in pairs]
        values = torch.stack([*inverse, salt, *given])
    else:
        numbers = [1.0 / (1.0 - beta1**step), 1.0 / (1.0 - beta2**step), salt_of(step), *pairs]
        values = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    return Hyper(values, beta1, beta2, eps)


def make_segments(
    starts: Sequence[int], groups: Sequence[int], num_elements: int, device: torch.device | str
) -> Segments:
    """The table of a flat buffer: segment i is [starts[i], starts[i + 1]), the last ends at `num_elements`.

    `starts` rises from 0; `groups[i]` is the segment's entry in the lr and weight_decay of `adamw_hyper`.
    Made once a buffer.

    Raises: ShapeError on starts that do not rise to the end, or without a group each.
    """
    bounds = (*starts, num_elements)
    rising = all(a < b for a, b in pairwise(bounds))
    require(bounds[0] == 0 and rising, "adamw: segment starts must rise from 0 to the end of the buffer.")
    require(len(groups) == len(starts), "adamw: one group a segment.")
    starts_S = torch.tensor(bounds, dtype=torch.int64)
    block_starts = torch.arange(0, num_elements, BLOCK)
    first = torch.searchsorted(starts_S, block_starts, right=True) - 1
    return Segments(
        bounds=bounds,
        group_of=tuple(groups),
        num_groups=max(groups, default=-1) + 1,
        starts=starts_S.to(device),
        groups=torch.tensor(groups, dtype=torch.int32).to(device),
        first=first.to(torch.int32).to(device),
    )


def supports(state: FlatState) -> str | None:
    """Why the kernel cannot update this buffer, or None."""
    dtypes = [state.param.dtype, state.grad.dtype]
    dtypes += [moment.dtype for moment, top in _moments(state) if top is None]
    if state.main is not None and state.main.dtype != torch.int16:
        dtypes.append(state.main.dtype)
    for dtype in dtypes:
        if dtype not in FUSED_DTYPES:
            return no_kernel_for(dtype)
    return why_not_on(state.param.device)


def adamw_(
    state: FlatState,
    hyper: Hyper,
    segments: Segments | None = None,
    *,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """One AdamW step in place. Formula: reference.py.

    Args:
        state: the buffers, contiguous [n] each (FlatState says which dtypes).
        hyper: from `adamw_hyper`.
        segments: from `make_segments`; None puts the whole buffer into group 0.
        grad_factor: 0-d, floating, on the device; the gradient is multiplied by it (clip coefficient / loss
            scale).
        found_inf: 0-d, floating, on the device; not 0 leaves everything bitwise as it is.

    Raises: ShapeError on buffers that do not fit; ConfigError when impl="triton" cannot run.
    """
    _check(state, segments)
    if segments is not None and segments.num_groups > hyper.num_groups:
        raise ShapeError(
            f"adamw: a segment of group {segments.num_groups - 1}, "
            f"hyperparameters of {hyper.num_groups} groups.",
            mend="give adamw_hyper an lr and a weight decay for each.",
        )
    if not use_triton("adamw", impl, supports(state)):
        adamw_reference(state, hyper, segments, grad_factor, found_inf)
        return
    table = (None,) * 3 if segments is None else (segments.starts, segments.groups, segments.first)
    _step(
        state.param, state.main, state.grad, state.exp_avg, state.exp_avg_sq, state.exp_avg_top,
        state.exp_avg_sq_top, hyper.values, grad_factor, found_inf, *table,
        hyper.beta1, hyper.beta2, hyper.eps,
    )  # fmt: skip


def _moments(state: FlatState) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """Both moments; one that is stored in 8 bits has tops beside its codes."""
    return (state.exp_avg, state.exp_avg_top), (state.exp_avg_sq, state.exp_avg_sq_top)


def _check(state: FlatState, segments: Segments | None) -> None:
    shape = state.param.shape
    for codes, top in _moments(state):
        if top is not None and not (
            codes.dtype == torch.uint8
            and top.dtype == torch.int16
            and top.is_contiguous()
            and codes.numel() == CODE_BLOCK * top.numel()
        ):
            raise ShapeError(
                f"adamw: {len(top)} {top.dtype} tops do not fit {len(codes)} codes of {codes.dtype}.",
                why=f"moments in 8 bits are uint8, with an int16 for each {CODE_BLOCK}.",
            )
    flat = len(shape) == 1
    for tensor in (state.param, state.grad, state.exp_avg, state.exp_avg_sq, state.main):
        if tensor is not None and not (flat and tensor.shape == shape and tensor.is_contiguous()):
            raise ShapeError(f"adamw takes contiguous 1-d buffers of one length, got {tuple(tensor.shape)}.")
    if state.main is not None and state.main.dtype == torch.int16:
        require(
            state.param.dtype == torch.bfloat16,
            "adamw: a 16-bit remainder needs a bf16 parameter.",
            why="together they are the 32 bits of the main parameter.",
        )
    require(
        segments is None or segments.bounds[-1] == shape[0],
        "adamw: the segment table was made for a buffer of another length.",
    )


def _fake(*_: Any) -> None:
    return None


_step = operator(
    "adamw_(Tensor(a!) param, Tensor(b!)? main, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq,"
    " Tensor(e!)? exp_avg_top, Tensor(f!)? exp_avg_sq_top, Tensor hyper, Tensor? grad_factor,"
    " Tensor? found_inf, Tensor? starts, Tensor? groups, Tensor? first,"
    " float beta1, float beta2, float eps) -> ()",
    lazily("redline.kernels.adamw.kernel", "step"),
    _fake,
)
