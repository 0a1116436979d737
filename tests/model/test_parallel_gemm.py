"""The order of work in the GEMMs of tensor parallelism: what travels, and what runs meanwhile."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from redline.comm import Group, linked_gemm
from redline.comm.collectives import Pending
from redline.comm.linked_gemm import Chunked
from redline.errors import ShapeError
from redline.model import TensorParallel, parallel_gemm

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

from link import Interval, Link, hidden

PAIR = Group(ranks=(0, 1), index=0)


class Work:
    """A collective under way that notes when it is waited for."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def wait(self) -> None:
        if f"wait {self.name}" not in self.events:
            self.events.append(f"wait {self.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a backward of two ranks that hold the same, the other one imagined."""
    found: list[str] = []

    def start(name: str, result: torch.Tensor) -> Pending:
        found.append(name)
        return Pending(result, (Work(found, name),))

    def wgrad(*args: torch.Tensor):
        found.append("wgrad")
        return grads(*args)

    grads = parallel_gemm.parameter_grads
    monkeypatch.setattr(parallel_gemm, "parameter_grads", wgrad)
    monkeypatch.setattr(linked_gemm, "all_gather_async", lambda x, group: start("gather", torch.cat((x, x))))
    monkeypatch.setattr(
        linked_gemm, "reduce_scatter_async", lambda x, group: start("scatter", 2 * x.chunk(2)[0])
    )
    monkeypatch.setattr(parallel_gemm, "all_reduce_async", lambda x, group: start("reduce", 2 * x))
    monkeypatch.setattr(linked_gemm, "all_gather", lambda x, group: torch.cat((x, x)))
    return found


def backward(tp: TensorParallel) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(4, size, generator=generator, dtype=torch.float64, requires_grad=True) for size in (6, 6)
    )
    parallel_gemm.column_linear(x, weight, fuse_wgrad=True, tp=tp).sum().backward()
    whole = torch.cat((x, x)) if tp.sequence else x
    torch.testing.assert_close(weight.grad, torch.ones(len(whole), 4, dtype=torch.float64).T @ whole)
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(4, 6))


@pytest.mark.parametrize("bulk_wgrad", [True, False])
@pytest.mark.parametrize("bulk_dgrad", [True, False])
def test_what_a_sequence_parallel_backward_hides(events, bulk_wgrad: bool, bulk_dgrad: bool) -> None:
    """The gather runs behind the dgrad GEMM, which ends where the scatter starts; that behind wgrad."""
    backward(TensorParallel(group=PAIR, sequence=True, bulk_wgrad=bulk_wgrad, bulk_dgrad=bulk_dgrad))
    assert (events.index("wait gather") > events.index("scatter")) == bulk_wgrad
    assert (events.index("wait scatter") > events.index("wgrad")) == bulk_dgrad
    assert events.index("wait gather") < events.index("wgrad"), "it reads what was gathered"


def test_without_sequence_parallelism_the_gradient_travels_behind_wgrad(events) -> None:
    backward(TensorParallel(group=PAIR))
    assert events == ["reduce", "wgrad", "wait reduce"]


def test_pieces_travel_while_others_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is on its way before the first product, and is waited for only just before its own."""
    found: list[str] = []
    product = torch.mm

    def mm(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        found.append(f"mm {len(out)}")
        return product(*args, out=out)

    def exchange(sends, receives, group):
        for (_, here), (_, there) in zip(sends, receives, strict=True):
            there.copy_(here)
        found.append("send")
        return (Work(found, f"{found.count('send')}"),)

    def scatter(part, x, group):
        part.copy_(2 * x.chunk(2)[group.index])
        found.append("scatter")
        return Pending(part, (Work(found, f"{found.count('scatter')}"),))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(linked_gemm, "exchange_async", exchange)
    monkeypatch.setattr(linked_gemm, "reduce_scatter_into_async", scatter)
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    y, whole = Chunked(2).gather_gemm(x, w, PAIR)
    assert found == ["send", "send", "mm 5", "wait 1", "mm 3", "wait 2", "mm 2"]
    torch.testing.assert_close(whole, torch.cat((x, x)))
    torch.testing.assert_close(y, whole @ w)
    found.clear()
    part = Chunked(2).gemm_scatter(whole, w, PAIR)
    assert found == ["mm 3", "mm 3", "scatter", "mm 2", "mm 2", "scatter", "wait 1", "wait 2"]
    torch.testing.assert_close(part, 2 * x @ w)
    with pytest.raises(ShapeError, match="5 rows cannot be spread over 2 ranks"):
        Chunked(2).gemm_scatter(x, w, PAIR)


# Overlap, measured on a link of fixed speed beside what the order of the pieces allows.

ROWS, PIECES = 8, 4
ROW_S, PIECE_S = 0.005, 0.02  # multiplying a row, and sending a piece of two


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Link, list[Interval]]:
    """The link between two ranks that hold the same, and when products were computed."""
    computed: list[Interval] = []
    link = Link(ROWS // PIECES * 3 * 8 / PIECE_S)
    product = torch.mm

    def mm(*args: torch.Tensor, out: torch.Tensor) -> None:
        start = time.perf_counter()
        time.sleep(len(out) * ROW_S)
        product(*args, out=out)
        computed.append((start, time.perf_counter()))

    def exchange(sends, receives, group):
        ((_, here),), ((_, there),) = sends, receives
        return (link.send(here.nbytes, lambda: there.copy_(here)),)

    def scatter(part, x, group):
        own = x.chunk(2)[group.index]
        return Pending(part, (link.send(own.nbytes, lambda: part.copy_(2 * own)),))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(linked_gemm, "exchange_async", exchange)
    monkeypatch.setattr(linked_gemm, "reduce_scatter_into_async", scatter)
    return link, computed


def test_pieces_hide_nine_tenths_of_what_their_order_allows(timed) -> None:
    """By intervals. A gather: two pieces behind the own rows' product, one behind the product of those two.

    A scatter: all but the last piece.
    """
    link, computed = timed
    x, w = torch.randn(ROWS, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    whole = torch.cat((x, x))
    gathered, scattered = [], []
    for _ in range(3):  # a busy machine only delays
        y, _ = Chunked(PIECES).gather_gemm(x, w, PAIR)
        torch.testing.assert_close(y, whole @ w)
        gathered.append(hidden(computed, link.intervals))
        computed.clear()
        link.intervals.clear()
        part = Chunked(PIECES).gemm_scatter(whole, w, PAIR)
        torch.testing.assert_close(part, 2 * x @ w)
        scattered.append(hidden(computed, link.intervals))
        computed.clear()
        link.intervals.clear()
    assert max(gathered) >= 0.9 * 3 * PIECE_S
    assert max(scattered) >= 0.9 * (PIECES - 1) * PIECE_S
