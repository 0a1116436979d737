"""Watches a run's throughput: says when it falls, and has the next step captured for the cause."""

from __future__ import annotations

from redline.ledger import StepAccount, StepRecord
from redline.ledger.causes import CAUSES
from redline.ledger.statistics import RunStatistics


class ThroughputWatch:
    """Compares each interval with the median of the run's steps.

    Args:
        share: how far below the median an interval may be.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._rates: list[float] = []
        self._is_low = False

    def add(self, record: StepRecord) -> None:
        """Take in one step; profiled ones tell nothing of throughput."""
        if not record.profiled:
            self._rates.append(record.tokens_per_s)

    def look(self, step: int, statistics: RunStatistics) -> str | None:
        """At the end of an interval: what to say if it was low, once until it has recovered.

        The first interval is never low: the median then is its own.
        """
        rates, self._rates = self._rates, []
        median = statistics.tokens_per_s
        if not rates or not median or statistics.steps <= statistics.warmup_steps + len(rates):
            return None
        rate = len(rates) / sum(1 / each for each in rates)  # equal tokens a step: the rate over the interval
        was_low, self._is_low = self._is_low, rate < (1 - self._share) * median
        if not self._is_low or was_low:
            return None
        return (
            f"step {step}: {rate:,.0f} tokens/s, {1 - rate / median:.0%} below this run's median of "
            f"{median:,.0f}; the ledger looks at the next step."
        )


def explain(found: StepAccount, before: StepAccount | None) -> str:
    """What a captured step says of a fall: the cause that grew most since the account before."""

    def grown(key: str) -> float:
        return found.loss_ms(key) - (0.0 if before is None else before.loss_ms(key))

    cause = max(CAUSES, key=grown)
    then = "" if before is None else f" (before: {before.loss_ms(cause):.3g} ms)"
    return (
        f"step {found.steps[-1]}: {found.wall_ms:.4g} ms, of which {CAUSES[cause].words} "
        f"{found.loss_ms(cause):.3g} ms{then}: account {CAUSES[cause].account}, "
        f"checks {' '.join(CAUSES[cause].mends) or 'none'}."
    )
