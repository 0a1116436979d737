"""Lines through measurements."""

from __future__ import annotations

from collections.abc import Sequence


def fit_latency_and_rate(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """alpha and beta of `seconds = alpha + size beta`, neither below 0: seconds a start and seconds a byte.

    Errors count relative to the measured time: a plain least-squares fit over four orders of magnitude would
    see the largest sizes alone.
    """
    weights = [1 / each**2 for each in seconds]
    total = sum(weights)
    x = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    spread = sum(w * (n - x) ** 2 for w, n, _ in points)
    beta = max(0.0, sum(w * (n - x) * (t - y) for w, n, t in points) / spread) if spread else 0.0
    alpha = y - beta * x
    if alpha >= 0:
        return alpha, beta
    return 0.0, sum(w * n * t for w, n, t in points) / sum(w * n * n for w, n, _ in points)
