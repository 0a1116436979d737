"""The line through times of collectives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.formulas.fit import fit_latency_and_rate

SIZES = [2.0**power for power in range(16, 31)]


@settings(derandomize=True, max_examples=20)
@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-12, 1e-8))
def test_an_exact_line_is_found(alpha: float, beta: float) -> None:
    """To a relative 1e-6: the sums run over four orders of magnitude."""
    found = fit_latency_and_rate(SIZES, [alpha + beta * size for size in SIZES])
    assert found == pytest.approx((alpha, beta), rel=1e-6, abs=1e-6 * alpha)


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """A fifth too much at 1 GiB must not swallow the latency, as it would without weights."""
    seconds = [2e-5 + size / 1e11 for size in SIZES]
    seconds[-1] *= 1.2
    alpha, beta = fit_latency_and_rate(SIZES, seconds)
    assert alpha == pytest.approx(2e-5, rel=0.05) and beta == pytest.approx(1e-11, rel=0.1)


def test_neither_is_negative() -> None:
    alpha, beta = fit_latency_and_rate([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])
    assert alpha == 0 and beta > 0
    alpha, beta = fit_latency_and_rate([1.0, 2.0], [2.0, 1.0])
    assert beta == 0 and alpha > 0
    assert fit_latency_and_rate([4.0], [2.0]) == (2.0, 0.0)
