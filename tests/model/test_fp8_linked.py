"""What travels beside GEMMs in fp8, and what of it they hide: by intervals, on a link of fixed speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.comm import Group, linked_gemm
from redline.comm.collectives import Pending
from redline.comm.linked_gemm import Chunked
from redline.kernels import fp8
from redline.model import TensorParallel
from redline.model.fp8 import Fp8Gemm
from redline.model.fp8_linked import LinkedColumnFn, LinkedRowFn, random_product
from redline.model.modules import Linear
from redline.precision.fp8 import Fp8Spec, Fp8State

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

from link import Interval, Link, hidden

PAIR = Group(ranks=(0, 1), index=0)
ROWS, PIECES = 16, 4  # of a rank
ROW_S, PIECE_S, GEMM_S = 0.0025, 0.02, 0.04  # multiplying a row, sending a piece, a GEMM of another gradient
ENOUGH = 0.9


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Link, list[Interval]]:
    """The link between two ranks that hold the same, and when GEMMs were computed."""
    link, computed = Link(1.0), []

    def slow(name: str, seconds: Callable[[Tensor], float]) -> None:
        run = getattr(fp8, name)

        def slower(x: Tensor, *rest: Any) -> Any:
            start = time.perf_counter()
            time.sleep(seconds(x))
            result = run(x, *rest)
            computed.append((start, time.perf_counter()))
            return result

        monkeypatch.setattr(fp8, name, slower)

    def send(result: Tensor, fill: Callable[[], Any] = lambda: None) -> Pending:
        return Pending(result, (link.send(PIECE_S, fill),))

    def exchange(sends, receives, group):
        ((_, here),), ((_, there),) = sends, receives
        return send(there, lambda: there.copy_(here)).work

    slow("gemm_into", lambda x: len(x) * ROW_S)
    slow("gemm", lambda _: GEMM_S)
    slow("add_wgrad", lambda _: GEMM_S)
    monkeypatch.setattr(linked_gemm, "all_gather", lambda x, group: torch.cat((x, x)))
    monkeypatch.setattr(linked_gemm, "all_gather_async", lambda x, group: send(torch.cat((x, x))))
    monkeypatch.setattr(linked_gemm, "reduce_scatter_async", lambda x, group: send(2 * x.chunk(2)[0]))
    monkeypatch.setattr(linked_gemm, "exchange_async", exchange)
    monkeypatch.setattr(
        linked_gemm, "reduce_scatter_into_async",
        lambda part, x, group: send(part, lambda: part.copy_(2 * x.chunk(2)[0])),
    )  # fmt: skip
    return link, computed


def site(function: Any, rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """(x, y) of a site of 32 to 16 features; its weight gradient goes to main_grad."""
    layer = Linear(32, 16, bias=False, linear=None, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(torch.randn(16, 32).bfloat16())
    layer.weight.main_grad = torch.zeros(16, 32)
    gemm = Fp8Gemm("site", layer, Fp8State(["site"], Fp8Spec(recipe="tensorwise"), "cpu"))
    gemm.refresh()
    x = torch.randn(rows, 1, 32).bfloat16().requires_grad_()
    more = (False,) if function is LinkedRowFn else ()
    return x, function.apply(x, layer.weight, None, gemm, tp, *more)


@pytest.mark.parametrize("bulk_wgrad", [True, False])
@pytest.mark.parametrize("bulk_dgrad", [True, False])
def test_backward_hides_what_it_is_told_to(timed, bulk_wgrad: bool, bulk_dgrad: bool) -> None:
    """The gather of x behind the dgrad GEMM, the scatter of dx behind the wgrad GEMM."""
    link, computed = timed
    tp = TensorParallel(group=PAIR, sequence=True, bulk_wgrad=bulk_wgrad, bulk_dgrad=bulk_dgrad)
    best = [0.0, 0.0]
    for _ in range(6):  # a busy machine only delays
        _, y = site(LinkedColumnFn, ROWS, tp)
        computed.clear()
        link.intervals.clear()
        y.sum().backward()
        assert len(link.intervals) == len(computed) == 2
        best = [max(old, hidden(computed, [sent])) for old, sent in zip(best, link.intervals, strict=True)]
        found = [seconds >= ENOUGH * PIECE_S for seconds in best]
        if found == [bulk_wgrad, bulk_dgrad]:
            break
    assert found == [bulk_wgrad, bulk_dgrad]
    assert all(seconds == 0 for seconds, on in zip(best, (bulk_wgrad, bulk_dgrad), strict=True) if not on)


def test_pieces_hide_nine_tenths_of_what_their_order_allows(timed) -> None:
    """Three of four pieces: of column's gather, row's scatter, and the gather of row's gradient."""
    link, computed = timed
    tp = TensorParallel(group=PAIR, sequence=True, gather_gemm=Chunked(PIECES), gemm_scatter=Chunked(PIECES))
    best = dict.fromkeys(("column", "row", "row, backward"), 0.0)

    def note(name: str) -> None:
        assert len(link.intervals) == PIECES
        best[name] = max(best[name], hidden(computed, link.intervals))
        computed.clear()
        link.intervals.clear()

    for _ in range(6):
        x, y = site(LinkedColumnFn, ROWS, tp)
        note("column")
        assert torch.equal(*y.chunk(2)) and x.isfinite().all()
        x, y = site(LinkedRowFn, 2 * ROWS, tp)
        note("row")
        y.sum().backward()
        computed.pop()  # the weight gradient, when all has come
        note("row, backward")
        if min(best.values()) >= ENOUGH * (PIECES - 1) * PIECE_S:
            return
    raise AssertionError(best)


def test_a_product_to_be_timed_multiplies_bytes() -> None:
    by = random_product(32, 16, torch.bfloat16, torch.device("cpu"))
    x = torch.ones(4, 32).to(torch.float8_e4m3fn).view(torch.uint8)
    y = by.empty(x, 4)
    by.into(x, y)
    assert y.isfinite().all() and y.any() and torch.equal(y[0], y[3])
