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
from redline.comm.linked_gemm import Chunked, LinkedGemm, Plain, Product

WARMUP, TIMED, GEMMS = 3, 10, 8


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one provider on the slowest rank."""

    provider: LinkedGemm
    ms: float


@dataclass(frozen=True, slots=True)
class Sites:
    """GEMMs that are joined to a collective: `rows` of each rank, and (K, N) of each product.

    Attributes:
        dtype: of matrices, and of what a `product` gives.
        bulk: also what travels behind another GEMM in backward.
        product: makes of K and N what multiplies rows of bytes [R, K]; None: they are matrices. Only Plain
            and Chunked multiply so, and they send the same behind other GEMMs: `bulk` is then not measured.
    """

    rows: int
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    bulk: bool = True
    product: Callable[[int, int], Product] | None = None
    device: torch.device | str = "cuda"


def time_gathers(providers: Sequence[LinkedGemm], sites: Sites, group: Group) -> list[Timing]:
    """gather([rows, K]) [K, N], and the gather alone behind the GEMM of dgrad; the fastest first."""
    if sites.product is not None:
        return _time_products(providers, sites, sites.product, group, gathers=True)
    operands = _operands(sites.rows, sites)
    outputs = [x.new_empty(group.size * sites.rows, w.shape[1]) for x, w in operands]

    def run(provider: LinkedGemm) -> None:
        for (x, w), dy in zip(operands, outputs, strict=True):
            provider.gather_gemm(x, w, group)
            if sites.bulk:
                gathering = provider.gather(x, group)
                dy @ w.T
                gathering.wait()

    def gemms() -> None:
        for (_, w), dy in zip(operands, outputs, strict=True):
            dy @ w.T

    return _sorted(providers, run, gemms, sites, group)


def time_scatters(providers: Sequence[LinkedGemm], sites: Sites, group: Group) -> list[Timing]:
    """scatter([size x rows, K] [K, N]), and the scatter alone behind the GEMM of wgrad; the fastest first."""
    if sites.product is not None:
        return _time_products(providers, sites, sites.product, group, gathers=False)
    operands = _operands(group.size * sites.rows, sites)
    outputs = [x.new_empty(len(x), w.shape[1]) for x, w in operands]

    def run(provider: LinkedGemm) -> None:
        for (x, w), y in zip(operands, outputs, strict=True):
            provider.gemm_scatter(x, w, group)
            if sites.bulk:
                scattering = provider.scatter(y, group)
                y.T @ x
                scattering.wait()

    return _sorted(providers, run, lambda: [x @ w for x, w in operands], sites, group)


def _time_products(
    providers: Sequence[LinkedGemm],
    sites: Sites,
    product: Callable[[int, int], Product],
    group: Group,
    *,
    gathers: bool,
) -> list[Timing]:
    """The same of rows that travel as bytes: the gather before their product, or the scatter behind it."""
    whole = group.size * sites.rows
    operands = [(_random_bytes(whole, K, sites.device), product(K, N)) for K, N in sites.sizes]
    outputs = [by.empty(x, len(x)) for x, by in operands]

    def run(provider: LinkedGemm) -> None:
        assert isinstance(provider, Plain | Chunked), "the others multiply matrices alone"
        for x, by in operands:
            if gathers:
                provider.gather_product(x[: sites.rows], by, group)
            else:
                provider.product_scatter(x, by, group)

    def gemms() -> None:
        for (x, by), y in zip(operands, outputs, strict=True):
            by.into(x, y)

    return _sorted(providers, run, gemms, sites, group)


def _random_bytes(rows: int, K: int, device: torch.device | str) -> Tensor:
    """Finite positive numbers in either format of fp8."""
    return torch.randint(0, 0x7B, (rows, K), dtype=torch.uint8, device=device)


def _operands(rows: int, sites: Sites) -> list[tuple[Tensor, Tensor]]:
    """Of each product a matrix and the transposed view of a weight, as a site multiplies them."""
    return [
        (
            torch.randn(rows, K, dtype=sites.dtype, device=sites.device),
            torch.randn(N, K, dtype=sites.dtype, device=sites.device).T,
        )
        for K, N in sites.sizes
    ]


def _sorted(
    providers: Sequence[LinkedGemm],
    run: Callable[[LinkedGemm], object],
    gemms: Callable[[], object],
    sites: Sites,
    group: Group,
) -> list[Timing]:
    times = torch.tensor([_median_ms(partial(run, each), gemms) for each in providers], device=sites.device)
    slowest = all_reduce(times, group, "max").tolist()
    timings = [Timing(each, ms) for each, ms in zip(providers, slowest, strict=True)]
    return sorted(timings, key=lambda timing: timing.ms)


def _median_ms(run: Callable[[], object], gemms: Callable[[], object]) -> float:
    """Of TIMED calls, each behind GEMMS times the plain GEMMs: the host is ahead then, as in training."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(WARMUP + TIMED):
        for _ in range(GEMMS):
            gemms()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in marks[WARMUP:])
