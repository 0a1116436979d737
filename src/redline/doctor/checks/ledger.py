"""A run that has been: measured against predicted, dips, skipped steps."""

from __future__ import annotations

from collections.abc import Iterator

from redline.doctor.case import Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.units import GIB

LOW_MFU = 0.40
SHOWN = 6  # causes in the evidence; the report lists all of them


@check("RL701", "kernels", "warning", needs="run")
def below_prediction(case: Case) -> Hit | None:
    """The run is slower than the cost model predicts of its configuration."""
    run, cost = case.run, case.cost
    assert run is not None
    if cost is None or run.step_s is None or run.on_cpu:
        return None
    share = 1 - cost.step_s / run.step_s
    if share < 2 * cost.uncertainty:
        return None
    words = {"measured": f"{run.step_s:.3g}", "predicted": f"{cost.step_s:.3g}", "share": f"{share:.0%}"}
    return Hit(words=words, share=share)


@check("RL702", "host", "warning", needs="run")
def dips(case: Case) -> Hit | None:
    """Steps that took far longer than the median."""
    run = case.run
    assert run is not None
    if run.step_s is None or not run.slow_steps or run.lost_share < 0.01:
        return None
    words = {
        "number": len(run.slow_steps),
        "steps": ", ".join(map(str, run.slow_steps[:8])),
        "every": run.slow_period or "-",
        "share": f"{run.lost_share:.1%}",
    }
    return Hit(words=words, text="period" if run.slow_period else "", share=run.lost_share)


@check("RL703", "host", "warning", needs="run")
def skipped(case: Case) -> Hit | None:
    """Steps whose work was thrown away."""
    run = case.run
    assert run is not None
    if not run.skipped_steps or run.steps == 0:
        return None
    share = run.skipped_steps / run.steps
    mend = (
        Mend(values={"fp16": False, "bf16": True})
        if case.has("launch") and case.config.precision.fp16
        else Mend()
    )
    words = {"number": run.skipped_steps, "steps": run.steps}
    return Hit(words=words, share=share, mend=mend)


@check("RL704", "kernels", "warning", needs="run")
def low_mfu(case: Case) -> Hit | None:
    """Below 40% MFU: the causes that hold the loss, from the ledger; else the accounts as predicted."""
    run, cost = case.run, case.cost
    assert run is not None
    if run.mfu is None or run.mfu >= LOW_MFU:
        return None
    words = {"mfu": f"{run.mfu:.1%}"}
    if run.losses:
        words["causes"] = ", ".join(f"{loss.cause} {run.lost(loss):.0%}" for loss in run.losses[:SHOWN])
        return Hit(words=words, text="ledger")
    if cost is None or run.on_cpu or not run.step_s or cost.step_s > run.step_s:
        return Hit(words=words, text="alone")
    accounts = {name: seconds for name, seconds in cost.accounts.items() if name != "ideal" and seconds}
    said = [
        f"{name} {seconds / run.step_s:.0%}" for name, seconds in sorted(accounts.items(), key=_by_seconds)
    ]
    said.append(f"unexplained {1 - cost.step_s / run.step_s:.0%}")
    return Hit(words=words | {"accounts": ", ".join(said)})


def _by_seconds(item: tuple[str, float]) -> float:
    return -item[1]


@check("RL705", "memory", "hint", needs="run")
def memory_left(case: Case) -> Iterator[Hit]:
    """A peak far from the card's size, or from the prediction."""
    run = case.run
    assert run is not None
    if run.memory_bytes is None or case.hardware is None or not case.hardware.memory_bytes:
        return
    share = run.memory_bytes / case.hardware.memory_bytes
    if share < 0.6 and case.hardware.kind == "cuda":
        yield Hit(words={"used": f"{run.memory_bytes / GIB:.1f} GiB", "share": f"{share:.0%}"})
    if run.predicted_memory and abs(run.memory_bytes / run.predicted_memory - 1) > 0.15:
        words = {"used": f"{run.memory_bytes / GIB:.1f} GiB", "said": f"{run.predicted_memory / GIB:.1f} GiB"}
        yield Hit(words=words, text="prediction")
