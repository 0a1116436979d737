"""Flags: unknown, retired, renamed, contradictory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redline.config.flags import UNSET, Spelling
from redline.config.launch import FlagUse
from redline.config.launch.successors import SUCCESSORS
from redline.config.problems import Problem
from redline.config.rules import violations
from redline.config.tree import spellings
from redline.doctor.case import Case, unstated
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.doctor.renames import respelled, succeeded

# Rules that a check of their own speaks of, or that concern only Redline's training.
SPOKEN = {
    "tp-divides-heads",
    "gather-overlap-needs",
    "tp-overlap-needs",
    "virtual-stages-divide",
    "split-needs-stages",
    "saved-activations-spread",
    "batch-of-microbatches",
    "length-stated",
    "vocabulary-stated",
    "old-spelling",
    "given-twice",
}
# Rules about files that Redline reads in its own way: Megatron-LM's other tokenizers take other files.
OWN_FILES = {"tokenizer-files", "mock-data-reads-nothing"}
MORE_FLAGS = "it may hold further flags."  # of an assumption: words that could not be read
# Fields of Redline's own whose shorthands (--swiglu) are Megatron's flags.
OWN_BUT_COMMON = {"activation_func", "preset"}


@check("RL601", "host", "error")
def unknown_flags(case: Case) -> Iterator[Hit]:
    """Flags that nobody parses."""
    assert case.launch is not None
    for use in case.launch.flags:
        if use.state == "unknown" and use.flag not in SUCCESSORS:
            words = {"flag": use.flag, "nearest": use.nearest or ""}
            mend = respelled(use)
            if mend.values.keys() & {other.field for other in case.launch.flags}:  # stated rightly as well
                mend = Mend(drop=(use.flag,))
            yield Hit(at=use.flag, words=words, text="near" if use.nearest else "", mend=mend)


@check("RL602", "host", "warning")
def retired_flags(case: Case) -> Iterator[Hit]:
    """Flags that Megatron-LM has renamed, removed or ignores, has on without them, or never had."""
    assert case.launch is not None
    if case.dialect == "redline" or case.launch.kind == "yaml":
        return
    for flag, use in {use.flag: use for use in case.launch.flags}.items():
        old = SUCCESSORS.get(flag)
        spelling = spellings().get(flag)
        if old is not None:
            words = {"flag": flag, "successor": old.mend.format(use.value or "").strip(), "why": old.why}
            text = "" if words["successor"] else "plain"
            yield Hit(at=flag, words=words, text=text, mend=_unless_stated(case, succeeded(use)))
        elif spelling is not None and _only_negated(spelling, flag):
            yield Hit(
                at=flag, words={"flag": flag}, text="default-on", severity="error", mend=Mend(drop=(flag,))
            )
        elif spelling is not None and _is_own(spelling):
            yield Hit(at=flag, words={"flag": flag}, text="own", severity="error", mend=Mend(drop=(flag,)))


def _unless_stated(case: Case, mend: Mend) -> Mend:
    """A successor is written only where the launch does not state it by itself, or says just that."""
    assert case.launch is not None
    others = {use.field for use in case.launch.flags if use.flag not in mend.rename}
    clash = any(name in others and case.get(name) != value for name, value in mend.values.items())
    if clash:
        return Mend()
    return Mend(drop=tuple(mend.rename)) if mend.rename and mend.values.keys() <= others else mend


def _is_own(spelling: Spelling) -> bool:
    """Whether a flag is Redline's alone; shorthands such as --swiglu are Megatron's."""
    return spelling.option.spec.own and spelling.option.field not in OWN_BUT_COMMON


def _only_negated(spelling: Spelling, flag: str) -> bool:
    """Whether Megatron-LM has a switch only in its negated form, because it is on by default."""
    option = spelling.option
    default = option.default if option.spec.megatron is UNSET else option.spec.megatron
    return option.kind is bool and option.count == 0 and default is True and flag == option.flag


@check("RL603", "host", "error")
def contradictions(case: Case) -> Iterator[Hit]:
    """Options that exclude, need or contradict each other."""
    assert case.launch is not None
    seen = set()
    for problem in (
        *case.launch.problems,
        *violations(case.config, explicit=case.launch.stated, training=False),
    ):
        if problem.rule in SPOKEN or problem.rule.startswith(("not-available", "not-in-redline", "built-in")):
            continue
        if problem.what in seen or _of_megatron(case, problem) or _unsure(case, problem):
            continue
        seen.add(problem.what)
        at = next(
            (flag for flag in problem.flags if case.uses(flag)), problem.flags[0] if problem.flags else ""
        )
        if case.dialect == "megatron" and problem.rule == "bad-value":
            problem = _megatron_choices(case, problem)
        words = {"what": problem.what, "why": problem.why, "mend": problem.mend}
        yield Hit(at=at, words=words, severity="warning" if problem.rule.startswith("needs/") else None)


def _unsure(case: Case, problem: Problem) -> bool:
    """Whether a rule speaks of numbers that nobody stated: they may stand where the reading ends."""
    launch = case.launch
    assert launch is not None
    if problem.rule == "shape-stated":  # as read; misspelt flags are taken as meant by now
        gone = all(case.said(name) for name in ("num_layers", "hidden_size", "num_attention_heads"))
        return gone or any(each.why == MORE_FLAGS for each in launch.assumptions)
    named = {table.option.field for flag in problem.flags if (table := spellings().get(flag))}
    return any(case.missing(name) for name in named)


def _megatron_choices(case: Case, problem: Problem) -> Problem:
    """A bad value against the choices that Megatron-LM has, not those that `redline train` obeys."""
    use = case.uses(*problem.flags)
    spelling = spellings().get(problem.flags[0])
    if use is None or spelling is None or not spelling.option.choices:
        return problem
    default = unstated(spelling.option.field, "megatron")
    own = ("auto", "fused") if spelling.option.field == "transformer_impl" else ()
    choices = [choice for choice in spelling.option.choices if choice not in own]
    what = f"{use.flag} {use.value}: Megatron-LM takes {', '.join(map(str, choices))}."
    mend = f"for example {spelling.option.show(default if default in choices else choices[0])}."
    return replace(problem, what=what, mend=mend)


def _of_megatron(case: Case, problem: Problem) -> bool:
    """Whether a rule of ours does not hold in Megatron-LM, which ignores what has no effect."""
    if case.dialect != "megatron":
        return False
    rule = problem.rule
    if rule == "bad-value":  # Megatron-LM and its forks have tokenizers that Redline has not heard of
        return problem.flags == ("--tokenizer-type",)
    return rule in OWN_FILES or (
        rule.startswith("needs/")
        and rule.removeprefix("needs/")
        in (
            "num-query-groups",
            "fp8-amax-history-len",
            "fp8-amax-compute-algo",
            "rotary-base",
            "rotary-percent",
            "moe-router-topk",
            "kv-channels",
            "load-optim",
            "load-rng",
            "override-opt-param-scheduler",
            "use-checkpoint-opt-param-scheduler",
        )
    )


@check("RL604", "host", "hint")
def repeated_flags(case: Case) -> Iterator[Hit]:
    """A flag given twice: the last counts."""
    assert case.launch is not None
    first: dict[str, str | None] = {}
    for use in case.launch.flags:
        if use.flag in first and first[use.flag] != use.value and use.value is not None:
            yield Hit(at=use.flag, words={"flag": use.flag, "first": first[use.flag], "last": use.value})
        first[use.flag] = use.value


@check("RL605", "host", "error")
def cut_off(case: Case) -> Iterator[Hit]:
    """Flags of a continued command that bash takes for a command of their own."""
    assert case.launch is not None
    groups: list[list[FlagUse]] = []
    for use in case.launch.cut_off:
        last = groups[-1][-1] if groups else None
        if last is None or last.file != use.file or use.line not in (last.line, last.line + 1):
            groups.append([])
        groups[-1].append(use)
    for group in groups:
        shown = " ".join(use.flag for use in group[:3]) + (" ..." if len(group) > 3 else "")
        yield Hit(at=group[0].flag, words={"flags": shown, "number": len(group)})
