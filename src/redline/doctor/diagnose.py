"""From a case to findings and a verdict: run every check, predict each mend, combine them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from redline.config.tree import options_by_field, spellings
from redline.doctor.case import Case, merge, unstated
from redline.doctor.checks import CHECKS
from redline.doctor.finding import SEVERITIES, Finding, Hit, Mend
from redline.doctor.gains import gain_of, gain_upon
from redline.doctor.messages import phrases, texts_of
from redline.doctor.registry import Check
from redline.doctor.renames import as_meant
from redline.errors import RedlineError
from redline.ledger import Loss
from redline.plan.cost import StepCost

WORTH = 0.01  # of a step, from which a further round of mends is worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything the doctor has to say.

    Attributes:
        findings: by expected gain, errors first.
        applied: the safe mends that go together, in the order they were combined.
        now, after: predicted steps, None where nothing can be predicted.
    """

    case: Case
    findings: tuple[Finding, ...]
    applied: tuple[Finding, ...]
    now: StepCost | None
    after: StepCost | None

    @property
    def worst(self) -> str | None:
        """The most severe severity; None without findings."""
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in SEVERITIES if severity in found), None)


def explained(diagnosis: Diagnosis) -> list[tuple[Loss, float, list[str]]]:
    """Each cause in a run's ledger with its share of the loss and the failed checks that may regain it."""
    run = diagnosis.case.run
    if run is None:
        return []
    found = []
    for loss in run.losses:
        failed = {finding.id for finding in diagnosis.findings if finding.may_regain(loss)}
        found.append((loss, run.lost(loss), [id for id in loss.mends if id in failed]))
    return found


ROUNDS = 3  # of mends upon mends: less recompute once sequence parallelism has freed memory, and so on


def diagnose(case: Case, *, lang: str = "en", checks: Iterable[Check] = CHECKS) -> Diagnosis:
    """Run every check whose needs the case meets, then again on the mended case while that brings more."""
    listed, given = tuple(checks), case
    if case.launch is not None:
        case = replace(case, launch=as_meant(case.launch))
    findings = [_finding(case, each, hit, lang) for each in listed for hit in _hits(case, each)]
    findings.sort(key=_order)
    applied = _combine(case, findings, [])
    for _ in range(ROUNDS if case.cost is not None else 0):
        further = _further(case, listed, applied, lang)
        if not further:
            break
        replaced = {finding.id for finding in further}
        findings = [finding for finding in findings if finding.id not in replaced] + further
        applied = [finding for finding in applied if finding.id not in replaced] + further
    findings += _advice(case, listed, applied, {finding.id for finding in findings}, lang)
    findings.sort(key=_order)
    after = case.after(*(finding.change for finding in applied)) if case.launch else None
    now = case.cost if case.launch else None
    return Diagnosis(case=given, findings=tuple(findings), applied=tuple(applied), now=now, after=after)


def _hits(case: Case, check: Check) -> list[Hit]:
    """A check's hits; `redline train` is never advised what this release or its rules refuse."""
    hits = check.hits(case)
    if case.dialect == "megatron" or case.launch is None:
        return hits
    obeyed = [case.obeyed(hit.mend) for hit in hits]
    return [
        hit if works else replace(hit, mend=Mend())
        for hit, works in zip(hits, obeyed, strict=True)
        if works or (hit.severity or check.severity) == "error"
    ]


def _further(case: Case, checks: tuple[Check, ...], applied: list[Finding], lang: str) -> list[Finding]:
    """Findings that pay once the applied mends are made: measured by the cost model on the mended case."""
    mended = case.mended(merge(tuple(finding.change for finding in applied)))
    before = mended.cost
    if before is None:
        return []
    say, found = phrases(lang), []
    for each in checks:
        if each.needs not in ("cost", "launch"):
            continue
        for hit in _hits(mended, each):
            after = mended.after(hit.mend)
            if not hit.mend.safe or not hit.mend.values or after is None or not mended.fits(after):
                continue
            gain = gain_upon(before, after, say)
            if (gain.step_time or 0.0) < WORTH:
                continue
            found.append(replace(_finding(mended, each, hit, lang), gain=gain))
    best = max(found, key=lambda finding: finding.gain.step_time or 0.0, default=None)
    if best is None:
        return []
    earlier = next((finding for finding in applied if finding.id == best.id), None)
    if earlier is not None:  # one finding speaks for both: its change includes the earlier one
        evidence = f"{earlier.evidence}; {best.evidence}"
        best = replace(best, evidence=evidence, change=merge((earlier.change, best.change)))
    file, line = case.place(next(iter(best.change.values), ""))
    return [replace(best, file=best.file or file, line=best.line or line)]


def _advice(
    case: Case, checks: tuple[Check, ...], applied: list[Finding], known: set[str], lang: str
) -> list[Finding]:
    """What is advised but not made, and shows only once the applied mends are (fp8, say)."""
    mended = case.mended(merge(tuple(finding.change for finding in applied)))
    if not applied or mended.cost is None:
        return []
    say, found = phrases(lang), []
    for each in checks:
        if each.needs != "cost" or each.id in known:
            continue
        for hit in _hits(mended, each):
            if hit.mend.safe or (after := mended.after(hit.mend)) is None:
                continue
            gain = gain_upon(mended.cost, after, say)
            found.append(replace(_finding(mended, each, hit, lang), gain=gain))
    return found


def _finding(case: Case, check: Check, hit: Hit, lang: str) -> Finding:
    texts, say = texts_of(check.id, hit.text, lang), phrases(lang)
    words = {**hit.words, "change": change_text(case, hit.mend, lang)}
    file, line = case.place(hit.at)
    return Finding(
        id=check.id,
        account=check.account,
        severity=hit.severity or check.severity,
        title=texts["title"].format(**words),
        evidence=texts["evidence"].format(**words),
        file=file,
        line=line,
        why=texts["why"].format(**words),
        mend=texts["mend"].format(**words),
        gain=gain_of(case, check, hit, say),
        change=hit.mend,
        causes=hit.causes,
    )


def _order(finding: Finding) -> tuple[int, float, int, str]:
    """Errors first, then by gain, then by severity."""
    gain = finding.gain.step_time or 0.0
    rank = SEVERITIES.index(finding.severity)
    return (0 if rank == 0 else 1, -gain, rank, finding.id)


def _combine(case: Case, findings: list[Finding], applied: list[Finding]) -> list[Finding]:
    """The safe mends that can be made together: each must leave a step that fits and is not slower."""
    best = case.cost
    for finding in findings:
        if not finding.change.acts or not finding.change.safe:
            continue
        mends = [each.change for each in applied] + [finding.change]
        if any(_disagree(each.change, finding.change) for each in applied):
            continue
        try:
            after = case.after(*mends)
        except RedlineError:
            continue
        if case.cost is not None and after is None:
            continue
        if best is not None and after is not None:
            repairs = not case.fits(best) and after.memory.total < best.memory.total
            if not repairs and (
                after.tokens_per_s < best.tokens_per_s * 0.999 or case.fits(best) > case.fits(after)
            ):
                continue
        applied.append(finding)
        best = after if after is not None else best
    return applied


def _disagree(one: Mend, other: Mend) -> bool:
    """Whether two mends set the same option or variable to different values."""
    options = any(one.values[name] != value for name, value in other.values.items() if name in one.values)
    return options or any(
        one.environment[name] != value for name, value in other.environment.items() if name in one.environment
    )


def change_text(case: Case, mend: Mend, lang: str = "en") -> str:
    """A mend as one would type it: "--sequence-parallel, without --fp16, export A=1"."""
    say = phrases(lang)
    added, removed = flag_changes(case, mend)
    added += mend.rename.values()
    removed += mend.rename
    parts = [" ".join(added)] if added else []
    if gone := [*removed, *mend.drop]:
        parts.append(say["without"].format(flags=" ".join(dict.fromkeys(gone))))
    for name, value in mend.environment.items():
        parts.append(say["unset"].format(name=name) if value is None else f"export {name}={value}")
    return ", ".join(parts) or say["by_hand"]


def flag_changes(case: Case, mend: Mend) -> tuple[list[str], list[str]]:
    """(flags to give, flags to take out) for a mend's values, where the launch differs from them now."""
    added: list[str] = []
    removed: list[str] = []
    written = fields_of(mend.rename.values())
    for name, value in mend.values.items():
        if case.launch is None or case.get(name) == value or name in written:
            continue
        option = options_by_field()[name]
        if value == unstated(name, case.dialect) and (uses := field_uses(case, name)):
            removed += uses
        elif value is not None and not (value is False and option.default is False):
            added.append(option.show(value))
    return added, removed


def fields_of(texts: Iterable[str]) -> set[str]:
    """Options that the flags in these texts set."""
    table = spellings()
    return {table[word].option.field for text in texts for word in text.split() if word in table}


def field_uses(case: Case, name: str) -> list[str]:
    """The flags by which the launch states an option, as typed, the one that counts first."""
    assert case.launch is not None
    uses = dict.fromkeys(use.flag for use in reversed(case.launch.flags) if use.field == name)
    return list(uses) or ([options_by_field()[name].flag] if case.said(name) else [])


def combined(diagnosis: Diagnosis) -> Mend:
    """All applied mends as one."""
    return merge(tuple(finding.change for finding in diagnosis.applied))
