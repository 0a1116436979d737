"""The waterfall of ledger.json: from peak down to the MFU, one bar a cause, and what may regain it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redline.doctor import CHECKS, Diagnosis, texts_of
from redline.ledger import Loss, ModuleRow, StepAccount
from redline.report.ledger_text import RAN_AT, SLOWED
from redline.units import format_duration

ACCOUNTS = ("kernels", "communication", "memory", "host", "unknown")
PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One loss, hanging where the bar before it ended; `left` and `width` in percent of the step.

    Attributes:
        gains: the cause took less than no time: kernels above a measured peak.
    """

    key: str
    cause: str
    account: str
    left: float
    width: float
    ms: float
    share: float
    mends: Sequence[str]
    gains: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """An account's part of the step, in the bar that shows the whole; `account` may be "useful"."""

    account: str
    ms: float
    share: float
    width: float


@dataclass(frozen=True, slots=True)
class Regain:
    """A check of the doctor's that may regain some of the causes.

    Attributes:
        share: of the step, of all its causes together.
        fails: whether it fails for this run; None where nobody examined it.
    """

    id: str
    title: str
    causes: Sequence[str]
    share: float
    fails: bool | None


@dataclass(frozen=True, slots=True)
class Module:
    """A module over all layers: milliseconds of a step by phase, FLOPs where they are known."""

    name: str
    ms: Mapping[str, float]
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """An account as the page draws it.

    Attributes:
        known: whether there is a peak to count points of MFU against; else shares of the time.
        step_ms: an ordinary step of the run, not profiled; None where the run had none.
    """

    known: bool
    account: StepAccount
    step_ms: float | None
    bars: Sequence[Bar]
    segments: Sequence[Segment]
    regains: Sequence[Regain]
    modules: Sequence[Module]

    @property
    def phases(self) -> list[str]:
        """Of the modules, in the order of a step; "" is work outside them."""
        found = {phase for module in self.modules for phase in module.ms}
        return sorted(
            found, key=lambda phase: (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)
        )

    @property
    def title(self) -> str:
        """What was profiled."""
        steps = self.account.steps
        if not steps:
            return "the profiled step"
        return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"

    @property
    def names(self) -> dict[str, str]:
        """Of the causes, and of the whole step, by key."""
        return {"wall": "the whole step"} | {
            loss.key: cause_of(loss, self.known) for loss in self.account.losses
        }

    @property
    def overhead(self) -> float | None:
        """How much longer a profiled step took than an ordinary one, as a share of that."""
        if self.account.overhead is not None or not self.step_ms:
            return self.account.overhead
        return self.account.wall_ms / self.step_ms - 1

    @property
    def caveat(self) -> str:
        """What is to be known of profiled steps that are not like the others; "" where they are."""
        if self.step_ms is None or self.overhead is None or self.overhead < SLOWED:
            return ""
        ideal_ms = self.account.ideal_ms
        reached = f", an MFU of {ideal_ms / self.step_ms:.1%}" if ideal_ms is not None else ""
        return (
            f"Slowed steps: an ordinary one takes {format_duration(self.step_ms / 1e3)}{reached}. "
            "The profiler delays the host, so part of what stands below as host, and as collectives that "
            "wait for a delayed rank, is its own."
        )

    @property
    def said(self) -> str:
        """The whole bar in a sentence."""
        return ", ".join(f"{each.account} {each.share:.1%}" for each in self.segments)


def waterfall_of(account: StepAccount, diagnosis: Diagnosis | None, step_s: float | None = None) -> Waterfall:
    """Bars by account and size, the account's total, and the checks by what they could regain.

    Args:
        step_s: an ordinary step, for an account that was written before the run had a median.
    """
    known = account.ideal_ms is not None
    ordered = sorted(
        (loss for loss in account.losses if loss.ms or loss.key == "unknown"),
        key=lambda loss: (ACCOUNTS.index(loss.account), -loss.ms),
    )
    return Waterfall(
        known=known,
        account=account,
        step_ms=account.reference.step_ms or (None if step_s is None else 1e3 * step_s),
        bars=list(_bars(ordered, known)),
        segments=_segments(ordered, account),
        regains=_regains(ordered, known, diagnosis),
        modules=_modules(account),
    )


def _bars(losses: Iterable[Loss], known: bool) -> Iterable[Bar]:
    at = 100.0
    for loss in losses:
        after = at - 100 * loss.share
        yield Bar(
            key=loss.key,
            cause=cause_of(loss, known),
            account=loss.account,
            left=round(max(0.0, min(at, after)), 3),
            width=round(abs(at - after), 3),
            ms=loss.ms,
            share=loss.share,
            mends=loss.mends,
            gains=loss.ms < 0,
        )
        at = after


def cause_of(loss: Loss, known: bool) -> str:
    """A loss in words; without a known peak nothing is below it."""
    return loss.cause if known else RAN_AT.get(loss.key, loss.cause)


def _segments(losses: Sequence[Loss], account: StepAccount) -> list[Segment]:
    sums: dict[str, float] = {} if account.ideal_ms is None else {"useful": account.ideal_ms}
    for loss in losses:
        sums[loss.account] = sums.get(loss.account, 0.0) + loss.ms
    drawn = sum(ms for ms in sums.values() if ms > 0) or 1.0
    return [
        Segment(name, ms, ms / account.wall_ms, round(100 * max(0.0, ms) / drawn, 3))
        for name, ms in sums.items()
    ]


def _regains(losses: Sequence[Loss], known: bool, diagnosis: Diagnosis | None) -> list[Regain]:
    """Those that fail first, then by what their causes hold."""
    checks = {each.id for each in CHECKS}
    findings = () if diagnosis is None else diagnosis.findings
    failed = {finding.id for finding in findings}
    causes: dict[str, list[Loss]] = {}
    for loss in losses:
        regain = {finding.id for finding in findings if finding.may_regain(loss)}
        for id in loss.mends if loss.ms > 0 else ():
            if id in regain or id not in failed:
                causes.setdefault(id, []).append(loss)
    found = [
        Regain(
            id,
            texts_of(id, "", "en")["title"] if id in checks else "a check of another release",
            [cause_of(loss, known) for loss in own],
            sum(loss.share for loss in own),
            None if diagnosis is None else id in failed,
        )
        for id, own in causes.items()
    ]
    return sorted(found, key=lambda regain: (not regain.fails, -regain.share, regain.id))


def _modules(account: StepAccount) -> list[Module]:
    """All layers together, the longest first; none where no module is named."""
    rows: dict[str, list[ModuleRow]] = {}
    for row in account.modules:
        rows.setdefault(row.module, []).append(row)
    if not any(rows):
        return []
    found = [
        Module(
            name or "(in no module)",
            {phase: sum(row.ms for row in own if row.phase == phase) for phase in {row.phase for row in own}},
            sum(row.flops or 0.0 for row in own),
        )
        for name, own in rows.items()
    ]
    return sorted(found, key=lambda module: -sum(module.ms.values()))


def side_by_side(falls: Mapping[str, Waterfall]) -> list[tuple[str, str, list[Bar | None]]]:
    """(cause, account, the bar in each run or None) of every cause that a run has, by account."""
    causes = {bar.key: (bar.cause, bar.account) for fall in falls.values() for bar in fall.bars}
    ordered = sorted(causes.items(), key=lambda item: ACCOUNTS.index(item[1][1]))
    return [
        (
            cause,
            account,
            [next((bar for bar in fall.bars if bar.key == key), None) for fall in falls.values()],
        )
        for key, (cause, account) in ordered
    ]
