"""The end of a run, as one document: reached beside predicted, and why everything was as it was."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

import torch

import redline
from redline.formulas.flops import Convention, TokenFlops
from redline.ledger import Ledger, RunSummary, Skew, StepAccount, ValidRecord, mfu
from redline.run.folder import RunFolder
from redline.run.fp8 import Fp8Watch, choices_now
from redline.run.memory import measured_activations, measured_memory
from redline.run.opening import OpenRun
from redline.run.profiling import ledger_of
from redline.step.saved import SavedCount


def summarize(
    run: OpenRun,
    folder: RunFolder,
    ledger: Ledger,
    *,
    flops: Mapping[Convention, TokenFlops],
    outcome: str,
    wall_time_s: float,
    test: ValidRecord | None,
    account: StepAccount | None,
    ranks: Skew | None,
    fp8: Fp8Watch | None = None,
    saved: SavedCount | str | None = None,
) -> RunSummary:
    """Everything a reader of summary.json may ask of the run.

    Args:
        flops: model FLOPs of the mean token that was trained on, in each convention.
        fp8: has the newest table of what casts to fp8 lost.
        ranks: how they compare, where that was asked for.
        saved: what the first step counted of activations, or why it did not.
    """
    plan, state, statistics = run.plan, run.state, ledger.statistics
    rate = statistics.tokens_per_s
    valid = ledger.last_valid
    return RunSummary(
        name=folder.root.name,
        outcome=outcome,
        steps=state.iteration,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        wall_time_s=wall_time_s,
        parameters=plan.parameters.total,
        hardware=run.hardware.as_dict(),
        utilisation=[
            mfu(each, rate / run.groups.world.size, run.hardware, plan.precision) for each in flops.values()
        ]
        if rate
        else [],
        tokens_per_s=rate,
        step_time_s=statistics.step_time_s,
        predicted_memory=plan.memory.as_dict(),
        # No growth: on a CPU all of it fitted into memory that the process held and had no use for.
        measured_memory_bytes=(run.meter.peak_bytes() or None) if statistics.steps else None,
        memory_measure=run.meter.measure,
        train_loss=statistics.last.loss if statistics.last else None,
        valid_loss=valid.loss if valid else None,
        unigram_loss=run.corpus.unigram_loss(run.config.data.split) if run.corpus and valid else None,
        skipped_steps=state.optimizer.skipped_steps,
        choices=choices_now(run.choices, plan.fp8, state.returned),
        files={
            "configuration": str(folder.config),
            "metrics": str(folder.metrics),
            "TensorBoard": str(tensorboard_folder(run, folder)),
            "checkpoints": str(folder.checkpoints),
            "summary": str(folder.summary),
        }
        | ({} if account is None else {"ledger": str(folder.ledger)})
        | ({"fp8": str(folder.fp8)} if fp8 is not None and fp8.rows else {}),
        versions={
            "redline": redline.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
        },
        extra={
            "measured_memory": measured_memory(
                run.meter,
                state.optimizer.buffers,
                {
                    "optimizer_stages": state.optimizer.adam.away.stages_bytes,
                    "fp8_copies": state.fp8.copies_bytes if state.fp8 is not None else 0,
                },
            )
            if statistics.steps
            else None,
            "measured_activations": measured_activations(saved),
            "measured_after_forward": run.meter.forward_bytes or None,
            "nonfinite_steps": state.nonfinite_steps,
            "world_size": run.groups.world.size,
            "ranks": ranks and ranks.as_dict(),
            "compiled": run.compiled and run.compiled.as_dict(),
            "ledger": ledger_of(account),
            "fp8": fp8.worst() if fp8 is not None else [],
            "fp8_returned": state.returned,
            "test_loss": None if test is None else test.loss,
            "data": [
                {"split": part.split, "name": part.name, "weight": part.weight, "epochs": part.epochs}
                for part in run.splits.parts
            ],
        },
    )


def tensorboard_folder(run: OpenRun, folder: RunFolder) -> str:
    """Where TensorBoard events go: --tensorboard-dir, else inside the run folder."""
    return run.config.logging.tensorboard_dir or str(folder.tensorboard)
