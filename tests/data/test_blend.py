"""Blending: golden order, the plain greedy loop as the reference, weights at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import blend
from redline.data.blend import blend_order, normalized, parse_blend, samples_to_build
from redline.errors import ConfigError


def reference_blend(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """The greedy rule, one sample after another."""
    drawn = [0] * len(weights)
    datasets, samples = [], []
    for step in range(size):
        deficits = [w * max(float(step), 1.0) - n for w, n in zip(weights, drawn, strict=True)]
        chosen = deficits.index(max(deficits))
        datasets.append(chosen)
        samples.append(drawn[chosen])
        drawn[chosen] += 1
    return datasets, samples


def test_golden() -> None:
    datasets, samples = blend_order([0.5, 0.3, 0.2], 10)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    raw=st.lists(st.integers(1, 40) | st.floats(1e-4, 1.0), min_size=1, max_size=7),
    size=st.integers(1, 400),
    lane_length=st.integers(1, 50),
)
def test_lanes_equal_the_loop(raw: list[float], size: int, lane_length: int) -> None:
    """Short lanes force many guessed starts, ties (equal weights) included; the order stays the loop's."""
    weights = normalized(raw)
    kept = blend.LANE_LENGTH
    blend.LANE_LENGTH = lane_length
    try:
        datasets, samples = blend_order(weights, size)
    finally:
        blend.LANE_LENGTH = kept
    assert (datasets.tolist(), samples.tolist()) == reference_blend(weights, size)


@pytest.mark.parametrize("weights", [[0.001, 0.999], [0.5, 0.5], [0.7, 0.2, 0.1], [0.1] * 10])
def test_many_lanes_equal_the_loop(weights: list[float]) -> None:
    weights = normalized(weights)
    datasets, samples = blend_order(weights, 20_000)
    assert (datasets.tolist(), samples.tolist()) == reference_blend(weights, 20_000)


def test_a_small_weight_never_draws_past_what_is_built_b095() -> None:
    """B095: 0.001/0.999 over 10k draws: counts within 1 of the weights, every index below what is built."""
    weights = normalized([0.001, 0.999])
    datasets, samples = blend_order(weights, 10_000)
    for number, weight in enumerate(weights):
        drawn = samples[datasets == number]
        assert abs(len(drawn) - weight * 10_000) <= 1
        assert drawn.tolist() == list(range(len(drawn)))
        assert len(drawn) <= samples_to_build(weight, 10_000)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(raw=st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=9), size=st.integers(1, 600))
def test_what_is_built_always_suffices(raw: list[float], size: int) -> None:
    weights = normalized(raw)
    counts = np.bincount(blend_order(weights, size)[0], minlength=len(weights))
    assert all(n <= samples_to_build(w, size) for n, w in zip(counts.tolist(), weights, strict=True))


def test_words_of_data_path() -> None:
    assert parse_blend(["a"], "--data-path") == (["a"], None)
    assert parse_blend(["0.3", "a", "0.7", "b"], "--data-path") == (["a", "b"], [0.3, 0.7])
    assert parse_blend(["a", "b"], "--data-path") == (["a", "b"], None)
    assert parse_blend(["1", "a", "b"], "--data-path") == (["1", "a", "b"], None)


@pytest.mark.parametrize("words", [["-1", "a", "2", "b"], ["0", "a"], ["nan", "a"], ["inf", "a", "1", "b"]])
def test_impossible_weights(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be blended"):
        parse_blend(words, "--data-path")
