"""What is timed to choose among linked GEMMs: the very calls that training makes, by a clock of one turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.comm import Group, linked_gemm, measure
from redline.comm.collectives import Pending
from redline.comm.linked_gemm import Chunked, Plain, Product
from redline.comm.measure import Sites, time_gathers, time_scatters
from redline.comm.symmetric import SymmetricMemory

PAIR = Group(ranks=(0, 1), index=0)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what travels, between two ranks that hold the same."""
    found: list[tuple[int, ...]] = []

    def note(x: Tensor, result: Tensor) -> Tensor:
        found.append(tuple(x.shape))
        return result

    def exchange(sends, receives, group):
        for (_, here), (_, there) in zip(sends, receives, strict=True):
            note(here, there.copy_(here))
        return ()

    def scatter_into(part: Tensor, x: Tensor, group: Group) -> Pending:
        return Pending(note(x, part.copy_(2 * x.chunk(2)[0])))

    def turn(run: Callable[[], object], gemms: Callable[[], object]) -> float:
        gemms()
        before = len(found)
        run()
        return float(len(found) - before)

    monkeypatch.setattr(linked_gemm, "all_gather", lambda x, group: note(x, torch.cat((x, x))))
    monkeypatch.setattr(linked_gemm, "reduce_scatter", lambda x, group: note(x, 2 * x.chunk(2)[0]))
    monkeypatch.setattr(linked_gemm, "exchange_async", exchange)
    monkeypatch.setattr(linked_gemm, "reduce_scatter_into_async", scatter_into)
    monkeypatch.setattr(measure, "_median_ms", turn)
    return found


def test_rows_that_travel_as_bytes_are_timed_by_products(called: list[tuple[int, ...]]) -> None:
    """Each product takes the own rows' bytes, or all; sums travel as the results they are."""
    seen: list[tuple[torch.dtype, int, int, int]] = []

    def product(K: int, N: int) -> Product:
        def into(x: Tensor, y: Tensor) -> None:
            assert x.shape[1] == K and y.shape == (len(x), N) and y.dtype == torch.bfloat16
            seen.append((x.dtype, len(x), K, N))

        return Product(into, N, torch.bfloat16)

    sites = Sites(4, ((3, 5), (3, 7)), torch.bfloat16, product=product, device="cpu")
    gathers = time_gathers([Chunked(2), Plain()], sites, PAIR)
    assert [each.provider for each in gathers] == [Plain(), Chunked(2)], "the fastest first"
    assert [each.ms for each in gathers] == [2, 4] and called == [(2, 3)] * 4 + [(4, 3)] * 2
    assert all(dtype == torch.uint8 for dtype, *_ in seen)
    assert seen[:2] == [(torch.uint8, 8, 3, 5), (torch.uint8, 8, 3, 7)], "ahead of it, whole products"
    called.clear()
    time_scatters([Plain(), Chunked(2)], sites, PAIR)
    assert called == [(8, 5), (8, 7), (4, 5), (4, 5), (4, 7), (4, 7)]
    with pytest.raises(AssertionError, match="matrices alone"):
        time_gathers([SymmetricMemory()], sites, PAIR)
