"""Accounts of several ranks as one: means, and for each cause the worst rank and how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from redline.ledger.account import ModuleRow, OperatorRow, RankAccount, Spread, StepAccount
from redline.ledger.causes import CAUSES, make_losses


def join_ranks(accounts: Sequence[StepAccount]) -> StepAccount:
    """One account of all ranks.

    Args:
        accounts: at least one; each of one rank.
    """
    ranks = tuple(sorted((rank for each in accounts for rank in each.ranks), key=lambda rank: rank.rank))
    if len(accounts) == 1:
        return accounts[0]
    count = len(ranks)
    wall_ms = sum(rank.wall_ms for rank in ranks) / count
    ideals = [rank.ideal_ms for rank in ranks if rank.ideal_ms is not None]
    ideal_ms = sum(ideals) / count if len(ideals) == count else None
    ms = {key: sum(rank.loss_ms(key) for rank in ranks) / count for key in CAUSES}
    return replace(
        accounts[0],
        wall_ms=wall_ms,
        ideal_ms=ideal_ms,
        mfu=None if ideal_ms is None else ideal_ms / wall_ms,
        losses=make_losses(ms, wall_ms, ideal_known=ideal_ms is not None),
        operators=_operators(accounts, count),
        modules=_modules(accounts, count),
        ranks=ranks,
        spread=tuple(_spread(ranks)),
    )


def _spread(ranks: Sequence[RankAccount]) -> Iterable[Spread]:
    def of(key: str, value: Callable[[RankAccount], float]) -> Spread:
        mean = sum(value(rank) for rank in ranks) / len(ranks)
        worst = max(ranks, key=value)
        skew = value(worst) / mean - 1 if mean > 0 else 0.0
        return Spread(key=key, mean_ms=mean, worst_ms=value(worst), worst_rank=worst.rank, skew=skew)

    yield of("wall", lambda rank: rank.wall_ms)
    for key in CAUSES:
        if any(rank.loss_ms(key) for rank in ranks):
            yield of(key, lambda rank, key=key: rank.loss_ms(key))  # type: ignore[misc]


def _operators(accounts: Sequence[StepAccount], count: int) -> tuple[OperatorRow, ...]:
    """Rows of one operator, phase and role summed and divided by the ranks; rates are means by time."""
    found: dict[tuple[str, str, str, str], list[OperatorRow]] = {}
    for each in accounts:
        for row in each.operators:
            found.setdefault((row.name, row.kind, row.phase, row.role), []).append(row)
    rows = [_mean_operator(group, count) for group in found.values()]
    return tuple(sorted(rows, key=lambda row: -row.ms))


def _mean_operator(group: Sequence[OperatorRow], count: int) -> OperatorRow:
    def total(name: str) -> float | None:
        values = [value for row in group if (value := getattr(row, name)) is not None]
        return sum(values) / count if values else None

    def by_time(name: str) -> float | None:
        values = [(value, row.ms) for row in group if (value := getattr(row, name)) is not None]
        weight = sum(ms for _, ms in values)
        return sum(value * ms for value, ms in values) / weight if weight else None

    changed: dict[str, Any] = {name: total(name) for name in ("calls", "ms", "flops", "bytes")}
    changed |= {name: by_time(name) for name in ("flops_per_s", "bytes_per_s", "of_peak", "of_bandwidth")}
    return replace(group[0], **changed)


def _modules(accounts: Sequence[StepAccount], count: int) -> tuple[ModuleRow, ...]:
    found: dict[tuple[int, str, str], list[ModuleRow]] = {}
    for each in accounts:
        for row in each.modules:
            key = (-1 if row.layer is None else row.layer, row.module, row.phase)
            found.setdefault(key, []).append(row)
    return tuple(_mean_module(found[key], count) for key in sorted(found))


def _mean_module(group: Sequence[ModuleRow], count: int) -> ModuleRow:
    flops = [row.flops for row in group if row.flops is not None]
    return replace(
        group[0],
        calls=sum(row.calls for row in group) / count,
        ms=sum(row.ms for row in group) / count,
        flops=sum(flops) / count if flops else None,
    )
