"""What a call costs the host: the quietest of what was measured, on few rows or none."""

from __future__ import annotations

import pytest
import torch
from made_case import norm_case

from redline.bench import host_times
from redline.bench.gate import draw
from redline.bench.host_times import cut
from redline.kernels.adamw import bench as adamw_bench


def test_host_time_is_that_of_the_quietest_round(monkeypatch):
    """Other jobs slow whole rounds down; a provider that takes no empty tensor has no figure."""
    clock = {"now": 0.0, "calls": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_times.time, "perf_counter", lambda: clock["now"])

    def provider(x, weight):
        assert len(x) == 1
        round_of = (clock["calls"] - 10) // host_times.HOST_CALLS
        clock["calls"] += 1
        clock["now"] += 2.0 if round_of == 3 else 4.0 + round_of

    found = [
        host_times.host_seconds(norm_case(provider), "fused", provider, torch.device("cpu"), rows)
        for rows in (1, 0)
    ]
    assert found == [2.0, None]
    assert clock["calls"] == 10 + host_times.HOST_ROUNDS * host_times.HOST_CALLS


def test_host_time_is_the_least_of_what_was_asked(monkeypatch):
    """For a while the host is half as fast; what an empty grid refuses stays without a figure."""
    answers = iter([2e-5, 4e-5, None, 6e-5, 1e-5, 5e-5, None, 3e-5])
    monkeypatch.setattr(host_times, "host_seconds", lambda *_: next(answers))
    providers = dict.fromkeys(("fused", "compile", "liger"), lambda x: x)
    rates = {name: {} for name in providers}
    for _ in range(2):
        host_times.add_host_times(norm_case(None), providers, torch.device("cpu"), rates)
    assert rates["fused"] == {"host_s": 1e-5, "host_one_row_s": 4e-5} and rates["compile"] == {}
    assert rates["liger"] == {"host_s": None, "host_one_row_s": 3e-5}


@pytest.mark.parametrize("case", adamw_bench.CASES, ids=lambda case: case.name)
def test_what_an_optimizer_step_costs_the_host_is_asked_of_few_elements(monkeypatch, case):
    monkeypatch.setattr(adamw_bench, "SIZE", 256)
    for rows in (0, 1, 2):
        state, hyper, factor = case.cut(draw(case, torch.device("cpu")), rows)
        assert len(state.param) == 64 * rows and len(hyper.values) == 5
        assert len(case.providers["eager"]()(state, hyper, factor)) == 64 * rows  # the parts still fit


def test_empty_inputs():
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4)
    empty = cut((x, weight, torch.arange(6), 3), 0)
    assert [getattr(each, "shape", each) for each in empty] == [(0, 4), (4,), (0,), 3]
    assert empty[0].requires_grad and empty[0].is_leaf and cut((3,), 0) == (3,)
    (one,) = cut((x.view(6, 4),), 1)  # what an operator may change in place stays no leaf
    assert one.shape == (1, 4) and one.requires_grad and not one.is_leaf
    square = cut((torch.randn(4, 4), torch.randn(4), torch.randn(4, 2)), 1)
    assert [each.shape for each in square] == [(1, 4), (4,), (1, 2)], "a gain is as wide as the rows"
