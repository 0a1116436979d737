"""Durations: rooflines, collectives, bubble."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.formulas.time import Link, Rates, attention_s, bubble_share, collective_s, gemm_s, stream_s
from redline.formulas.traffic import sent_bytes

RATES = Rates(
    peak={"bf16": 1e15, "fp8": 2e15},
    gemm={"bf16": 0.7, "fp8": 0.6},
    attention={"flash": (0.6, 0.5)},
    bytes_per_s=3e12,
    units=132,
    kernel_s=2e-6,
    node=Link(bytes_per_s=350e9, latency_s=20e-6, hop_s=2e-6),
    network=Link(bytes_per_s=40e9, latency_s=40e-6, hop_s=15e-6),
    gpus_per_node=8,
    host_bytes_per_s=50e9,
)
SIZE = st.integers(1, 20_000)


@given(SIZE, SIZE, SIZE)
@settings(max_examples=100, derandomize=True)
def test_gemm_never_beats_its_roofline(m: int, n: int, k: int) -> None:
    took = gemm_s(RATES, m, n, k, "bf16")
    assert took >= 2 * m * n * k / (1e15 * 0.7)
    assert took >= 2 * (m * k + k * n + m * n) / 3e12
    assert took >= 0.95 * gemm_s(RATES, m, n, k // 2, "bf16")  # split-k may gain a little from depth


def test_large_gemm_reaches_its_share() -> None:
    flops = 2 * 16384**3
    assert flops / gemm_s(RATES, 16384, 16384, 16384, "bf16") == pytest.approx(0.7e15, rel=0.03)
    small = 2 * 1024 * 512 * 4096 / gemm_s(RATES, 1024, 512, 4096, "bf16")
    assert small < 0.35e15


def test_fp8_gains_more_on_large_gemms() -> None:
    def gain(size: int) -> float:
        return gemm_s(RATES, size, size, size, "bf16") / gemm_s(RATES, size, size, size, "fp8")

    assert 1.0 < gain(1024) < gain(8192) < 2.0


def test_attention_prefers_wide_heads_and_long_sequences() -> None:
    def took(head: int, length: int) -> float:
        return attention_s(RATES, 1e13, "flash", head, length, backward=False)

    assert took(64, 8192) > took(128, 8192) > took(128, 32768)
    assert attention_s(RATES, 1e13, "flash", 128, 8192, backward=True) > took(128, 8192)


@pytest.mark.parametrize(
    ("kind", "factor"), [("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_reduce", 7 / 4)]
)
def test_bytes_sent(kind: str, factor: float) -> None:
    assert sent_bytes(kind, 800, 8) == pytest.approx(800 * factor)  # type: ignore[arg-type]
    assert sent_bytes(kind, 800, 1) == 0  # type: ignore[arg-type]


def test_collectives_know_the_node() -> None:
    inside = collective_s(RATES, "all_reduce", 1e9, 8)
    across = collective_s(RATES, "all_reduce", 1e9, 8, stride=8)
    assert across > 5 * inside
    # Eight members in each of two nodes use eight network cards: NVLink is the limit again.
    assert collective_s(RATES, "all_gather", 1e9, 16) < 2 * collective_s(RATES, "all_gather", 1e9, 8)
    assert collective_s(RATES, "all_reduce", 1e9, 1) == 0 == collective_s(RATES, "all_reduce", 0, 8)


def test_a_measured_collective_has_its_own_line_inside_a_node() -> None:
    measured = replace(RATES, collectives={"all_gather": Link(bytes_per_s=1e11, latency_s=5e-5, hop_s=1e-6)})
    assert collective_s(measured, "all_gather", 1e9, 2) == pytest.approx(5.1e-5 + 0.5e9 / 1e11)
    for kind, stride in (("all_reduce", 1), ("all_gather", 8)):  # nobody measured it; it leaves the node
        assert collective_s(measured, kind, 1e9, 2, stride) == collective_s(RATES, kind, 1e9, 2, stride)  # type: ignore[arg-type]


def test_stream_and_bubble() -> None:
    assert stream_s(RATES, 6e12) == pytest.approx(2.0)
    assert bubble_share(4, 1, 12) == pytest.approx(0.25)
    assert bubble_share(4, 5, 12) == pytest.approx(0.05)
    assert bubble_share(1, 1, 1) == 0
