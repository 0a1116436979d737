"""RL106: a fusion that was switched off, the time of the ledger that it may regain, and no other."""

from dataclasses import replace
from pathlib import Path

import pytest
from good_launch import case_of, script

from redline.doctor import LANGUAGES, diagnose, explained, texts_of
from redline.doctor.checks.kernels import CAUSE_OF
from redline.doctor.runs import RunRecord
from redline.formulas.operators import OPERATORS
from redline.ledger import Loss
from redline.ledger.causes import CAUSES
from redline.plan.kernels import SWITCHES

SHARES = {"norm": 0.014, "activation": 0.024, "optimizer": 0.011, "other": 0.144}
OF = {
    "--no-persist-layer-norm": ["norm"],
    "--no-bias-swiglu-fusion": ["activation"],
    "--no-embedding-fusion": ["other"],
    "--no-adamw-fusion": ["optimizer"],
    "--no-grad-norm-fusion": ["optimizer"],
}


def loss(key: str) -> Loss:
    cause, share = CAUSES[key], SHARES[key]
    return Loss(
        key=key,
        account=cause.account,
        cause=cause.words,
        ms=share,
        share=share,
        points=None,
        mends=cause.mends,
    )


RUN = RunRecord(steps=50, step_s=1.0, tokens_per_s=1.0, mfu=0.3, losses=tuple(map(loss, SHARES)))


def test_every_switch_is_looked_at_and_every_operator_has_its_cause() -> None:
    """A new switch needs its flag in the texts, a new operator its place in the ledger."""
    flags = ["--no-" + name.replace("_", "-") for name in SWITCHES]
    for lang in LANGUAGES:
        assert texts_of("RL106", "", lang)["looks"].split(", ") == flags
    assert CAUSE_OF.keys() == OPERATORS
    assert {key for key, cause in CAUSES.items() if "RL106" in cause.mends} == set(CAUSE_OF.values())


@pytest.mark.parametrize("flag", OF)
def test_a_switch_is_bound_by_its_own_cause(flag: str, tmp_path: Path) -> None:
    case = replace(case_of(tmp_path, script({flag: None}), dialect="redline"), run=RUN)
    found = diagnose(case)
    (finding,) = [each for each in found.findings if each.id == "RL106"]
    assert [loss.key for loss, _, checks in explained(found) if "RL106" in checks] == OF[flag]
    share = sum(SHARES[key] for key in OF[flag])
    assert finding.gain.step_time is None and f"at most {share:.1%} of the step" in finding.gain.basis
    assert ("one by one" in finding.why) == (OF[flag] != ["optimizer"])  # PyTorch's AdamW is one kernel too


def test_on_a_cpu_no_kernel_is_missed(tmp_path: Path) -> None:
    case = case_of(tmp_path, script(dict.fromkeys(OF)), gpu=None, dialect="redline")
    for on_cpu in (False, True):
        found = diagnose(replace(case, run=replace(RUN, on_cpu=on_cpu))).findings
        assert ("RL106" in {each.id for each in found}) != on_cpu


def test_a_plain_loss_is_missed_where_it_was_switched_off(tmp_path: Path) -> None:
    """Megatron's is plain by default: RL107 speaks of that."""
    text = script({"--no-cross-entropy-loss-fusion": None}, ("--cross-entropy-loss-fusion",))
    for dialect, id in (("redline", "RL106"), ("megatron", "RL107")):
        listed = {each.id for each in diagnose(case_of(tmp_path, text, dialect=dialect)).findings}
        assert {"RL106", "RL107"} & listed == {id}
