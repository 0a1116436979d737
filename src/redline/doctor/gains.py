"""What a mend gains and how that is known: measured, predicted, by arithmetic; else why nobody can say."""

from __future__ import annotations

from collections.abc import Mapping

from redline.doctor.case import Case
from redline.doctor.finding import Gain, Hit, may_regain
from redline.doctor.registry import Check
from redline.plan.cost import StepCost

SEEN = 5e-4  # of a step: less is "below 0.1%"
# Where the cost model does not look: the phrase ("unknown_" before it) that says why there is no figure.
UNKNOWN: Mapping[str, str] = {
    id: why
    for why, ids in {
        "data": "RL011 RL404 RL408",
        "files": "RL403 RL414",
        "host": "RL401 RL402 RL405 RL406 RL409 RL410 RL411 RL412 RL507 RL510 RL512",
        "numbers": "RL109 RL120 RL122",
        "rare": "RL304 RL502 RL505 RL509 RL703",
        "shape": "RL102 RL103 RL119 RL202 RL218",
        "kernel": "RL003 RL105 RL106 RL107 RL110 RL112 RL113 RL115 RL117 RL118 RL514 RL516",
        "links": "RL008 RL009 RL501 RL503 RL504 RL506 RL511 RL513 RL515 RL517 RL518 RL508",
        "memory": "RL301 RL302 RL306 RL307 RL308 RL310 RL705",
        "table": "RL309",
        "log": "RL413 RL604",
        "flags": "RL601 RL602 RL603 RL605",
        "run": "RL701 RL702 RL704",
    }.items()
    for id in ids.split()
}


def gain_of(case: Case, check: Check, hit: Hit, say: Mapping[str, str]) -> Gain:
    """The gain of one mend alone: measured where there is a run, else the cost model run again with it."""
    if hit.share is not None:
        basis = hit.basis or ("basis_measured" if check.needs == "run" else "basis_arithmetic")
        return Gain(hit.share, say[basis])
    if case.cost is None or not hit.mend.acts:
        return Gain(None, _unknown(case, check, hit, say))
    after = case.after(hit.mend)
    if after is None or not case.sees(hit.mend):
        return Gain(None, _unknown(case, check, hit, say))
    now = case.cost
    saved_bytes = round(now.memory.total - after.memory.total)
    # By tokens, so that a mend that changes the batch is compared fairly.
    saved = 1 - now.tokens_per_s / after.tokens_per_s
    if abs(saved) < SEEN and abs(saved_bytes) < 2**20:
        return Gain(0.0, say["basis_small"])
    same_tokens = now.step_s * now.tokens_per_s / after.tokens_per_s
    batch = abs(same_tokens / after.step_s - 1) > 1e-6  # the step holds other tokens than before
    basis = say["basis_tokens" if batch else "basis_model"].format(
        now=f"{now.step_s:.4g}", after=f"{same_tokens:.4g}", error=f"{now.uncertainty:.0%}"
    )
    return Gain(saved, basis, saved_bytes)


def gain_upon(before: StepCost, after: StepCost, say: Mapping[str, str]) -> Gain:
    """The gain of a mend on top of the applied ones, by tokens."""
    times = {"now": f"{before.step_s:.4g}", "after": f"{after.step_s:.4g}"}
    basis = say["basis_upon"].format(**times, error=f"{before.uncertainty:.0%}")
    saved_bytes = round(before.memory.total - after.memory.total)
    return Gain(1 - before.tokens_per_s / after.tokens_per_s, basis, saved_bytes)


def _unknown(case: Case, check: Check, hit: Hit, say: Mapping[str, str]) -> str:
    """Why there is no figure; where the run has a ledger, the most it could be."""
    losses = () if case.run is None else case.run.losses
    if of := [loss for loss in losses if may_regain(check.id, hit.causes, loss)]:
        causes = ", ".join(f"{loss.cause} {loss.share:.1%}" for loss in of)
        return say["unknown_at_most"].format(share=f"{sum(loss.share for loss in of):.1%}", causes=causes)
    if case.run is not None and case.run.losses and check.id == "RL704":
        return say["unknown_shares"]
    if check.needs not in ("machine", "environment", "run") and (hit.severity or check.severity) == "error":
        return say["unknown_start"]
    if case.cost is None and case.launch is not None and hit.mend.acts:
        return say["unknown_step"]
    return say[f"unknown_{UNKNOWN.get(check.id, 'start')}"]
