"""The tensor-parallel axis of a run: who shares the model, and what joins their collectives to GEMMs."""

from __future__ import annotations

from redline.choice import Choice
from redline.comm import Groups
from redline.config import RunConfig
from redline.model import TensorParallel


def tensor_parallel(config: RunConfig, groups: Groups) -> tuple[TensorParallel, tuple[Choice, ...]]:
    """The axis as the model uses it, and the record of it; one rank has none."""
    tp = TensorParallel(group=groups.tp, sequence=config.parallel.sequence_parallel)
    if tp.size == 1:
        return tp, ()
    what = "matrices and sequence" if tp.sequence else "matrices"
    return tp, (Choice("tensor-parallel", str(tp.size), f"{tp.size} ranks", f"as asked: they share {what}"),)
