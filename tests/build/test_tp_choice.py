"""What joins tensor-parallel collectives to their GEMMs: asked for by name, or the fastest that can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.build import tensor_parallel as room
from redline.comm import Group, Groups
from redline.comm.linked_gemm import Chunked, LinkedGemm, Plain
from redline.comm.measure import Sites, Timing
from redline.comm.pushed import Pushed
from redline.comm.symmetric import SymmetricMemory
from redline.config import parse_args
from redline.errors import ConfigError
from redline.hardware import hardware_named
from redline.plan import make_plan

WORDS = (
    "--preset llama3.2-1b --seq-length 1024 --micro-batch-size 1 --global-batch-size 1 --mock-data "
    "--train-iters 1 --eval-iters 0 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
)
MS: dict[type, float] = {Pushed: 4.0, SymmetricMemory: 3.0, Plain: 2.0, Chunked: 1.0}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Sites]:
    """The sites that are measured; each kind of provider takes its MS."""
    seen: list[Sites] = []

    def timer(providers: list[LinkedGemm], sites: Sites, group: Group) -> list[Timing]:
        seen.append(sites)
        return sorted((Timing(each, MS[type(each)]) for each in providers), key=lambda timing: timing.ms)

    monkeypatch.setattr(room, "time_gathers", timer)
    monkeypatch.setattr(room, "time_scatters", timer)
    return seen


def axis(words: str = "", device: str = "cuda") -> tuple[Any, dict[str, str]]:
    config = parse_args(f"{WORDS} {words}".split()).config
    hardware = hardware_named("h200")
    assert hardware is not None
    plan = make_plan(config, hardware, 128256, 2)
    pair = Groups(tp=Group((0, 1), 0))
    tp, choices = room.tensor_parallel(config, plan, pair, torch.bfloat16, torch.device(device))
    return tp, {choice.what: f"{choice.ran}: {choice.why}" for choice in choices}


def test_auto_takes_the_fastest_at_every_kind_of_site(timed: list[Sites]) -> None:
    tp, choices = axis()
    assert type(tp.gather_gemm) is type(tp.gemm_scatter) is Chunked
    assert [sites.sizes for sites in timed] == [((2048, 1536), (2048, 8192)), ((1024, 2048), (4096, 2048))]
    assert all(sites.rows == 512 and sites.bulk for sites in timed)
    gather = choices["tp-comm-overlap, gather"]
    assert gather.startswith("chunked (2): the fastest of") and "; not pushed: it needs GPUs" in gather


def test_one_object_pushes_for_all_sites(timed: list[Sites], monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one area and its turns, so two objects would write over each other."""
    monkeypatch.setattr(room, "open_area", lambda group, num_bytes: object())
    monkeypatch.setattr(room, "reserve", lambda group, num_bytes: None)
    monkeypatch.setitem(MS, Pushed, 0.5)
    tp, choices = axis()
    assert tp.gather_gemm is tp.gemm_scatter and isinstance(tp.gather_gemm, Pushed)
    assert "symmetric" in choices["tp-comm-overlap, scatter"]


def test_in_fp8_auto_measures_what_multiplies_bytes(timed: list[Sites]) -> None:
    """By products of bytes, where some layer has one there; in 16 bits what none has in fp8."""
    tp, choices = axis("--fp8 --fp8-keep-bf16 *.fc1 *.proj *.fc2")
    assert tp.gather_gemm == tp.gemm_scatter == Chunked(2)
    gather, scatter = timed
    assert gather.sizes == ((2048, 1536),) and scatter.sizes == ((1024, 2048), (4096, 2048))
    assert gather.product is not None and scatter.product is None
    said = choices["tp-comm-overlap, gather"]
    assert (
        said.startswith("chunked (2): the fastest of chunked (2) 1.00 ms, chunked (4)")
        and "plain 2.00" in said
    )
    assert said.endswith("not pushed or symmetric: they multiply 16 bits alone")
    timed.clear()
    tp, choices = axis("--fp8", device="cpu")
    assert timed == [] and "nothing is measured on a CPU" in choices["tp-comm-overlap, gather"]
    tp, _ = axis("--fp8 --tp-comm-overlap-method plain")
    assert tp.gather_gemm == tp.gemm_scatter == Plain()
    for method in ("pushed", "symmetric"):
        with pytest.raises(ConfigError, match=r"(?s)does not go with --fp8-format.*use .*chunked"):
            axis(f"--fp8 --tp-comm-overlap-method {method}")


def test_what_is_switched_off_is_neither_measured_nor_joined(timed: list[Sites]) -> None:
    tp, _ = axis("--no-tp-comm-overlap-ag --no-tp-comm-bulk-dgrad")
    assert isinstance(tp.gather_gemm, Plain) and isinstance(tp.gemm_scatter, Chunked)
    assert [sites.bulk for sites in timed] == [False] and not tp.bulk_dgrad and tp.bulk_wgrad
    tp, choices = axis(device="cpu")
    assert (
        tp.gather_gemm == Chunked(2) and "nothing is measured on a CPU" in choices["tp-comm-overlap, gather"]
    )


def test_what_hides_nothing_in_backward_claims_nothing(timed: list[Sites]) -> None:
    _, choices = axis("--no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad")
    assert choices["tp-comm-overlap, backward"] == "in the open: switched off"
    with pytest.raises(ConfigError, match="--tp-comm-overlap-rs-dgrad has no effect without"):
        axis("--tp-comm-overlap-rs-dgrad --no-tp-comm-overlap-rs")


@pytest.mark.parametrize("words", ["plain", "pushed", "symmetric"])
def test_pieces_of_what_is_not_cut_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--tp-comm-overlap-chunks 4 has no effect without"):
        axis(f"--tp-comm-overlap-method {words} --tp-comm-overlap-chunks 4")


@pytest.mark.parametrize("method", ["pushed", "symmetric"])
def test_a_method_that_cannot_run_is_refused_with_its_reason(method: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){method} cannot run here.*NVLink"):
        axis(f"--tp-comm-overlap-method {method}")
