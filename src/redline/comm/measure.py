"""Which linked GEMM is the fastest for the sizes of a run: measured, with the same answer on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redline.comm.collectives import all_reduce
from redline.comm.groups import Group
from redline.comm.linked_gemm import LinkedGemm

WARMUP, TIMED = 3, 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one provider on the slowest rank."""

    provider: LinkedGemm
    ms: float


def time_gather_gemm(
    providers: Sequence[LinkedGemm], rows: int, K: int, N: int, dtype: torch.dtype, group: Group
) -> list[Timing]:
    """gather([rows, K]) [K, N] by each provider, the fastest first."""
    x, w = _operands(rows, K, N, dtype)
    return _sorted(providers, lambda each: each.gather_gemm(x, w, group), group)


def time_gemm_scatter(
    providers: Sequence[LinkedGemm], rows: int, K: int, N: int, dtype: torch.dtype, group: Group
) -> list[Timing]:
    """scatter([size x rows, K] [K, N]) by each provider, the fastest first."""
    x, w = _operands(group.size * rows, K, N, dtype)
    return _sorted(providers, lambda each: each.gemm_scatter(x, w, group), group)


def total(sites: Sequence[Sequence[Timing]]) -> list[Timing]:
    """The sum over sites that the same providers were timed at, the fastest first."""
    ms = {each.provider: 0.0 for each in sites[0]}
    for timing in (timing for site in sites for timing in site):
        ms[timing.provider] += timing.ms
    return sorted((Timing(provider, each) for provider, each in ms.items()), key=lambda timing: timing.ms)


def _operands(rows: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix and the transposed view of a weight, as a site multiplies them."""
    x = torch.randn(rows, K, dtype=dtype, device="cuda")
    return x, torch.randn(N, K, dtype=dtype, device="cuda").T


def _sorted(
    providers: Sequence[LinkedGemm], run: Callable[[LinkedGemm], object], group: Group
) -> list[Timing]:
    times = torch.tensor([_median_ms(partial(run, each)) for each in providers], device="cuda")
    slowest = all_reduce(times, group, "max").tolist()
    timings = [Timing(each, ms) for each, ms in zip(providers, slowest, strict=True)]
    return sorted(timings, key=lambda timing: timing.ms)


def _median_ms(run: Callable[[], object]) -> float:
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(WARMUP + TIMED):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in marks[WARMUP:])
