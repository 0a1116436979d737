"""`--z-loss`: trained on, told apart, and no part of what loss and evaluation say."""

from __future__ import annotations

from typing import Any

import pytest


def test_the_z_loss_is_told_apart(train: Any) -> None:
    """Without learning, loss and evaluation are those of a run without it; with, it pulls the gradient.

    Its part is the weight times the mean squared log-partition: log(101)^2 for logits near 0.
    """
    still = "--lr 0 --min-lr 0 --hidden-dropout 0 --attention-dropout 0 --fp64"
    plain, z = train("plain", still), train("z", f"{still} --z-loss 0.25")
    assert z.losses == pytest.approx(plain.losses, rel=1e-12)
    assert z.valid_losses == pytest.approx(plain.valid_losses, rel=1e-12)
    parts = [record["z_loss"] for record in z.records()]
    assert parts == pytest.approx([0.25 * 21.3] * 6, rel=0.1) and len(set(parts)) == 6
    assert "z_loss" not in plain.records()[0]
    norms = [[record["grad_norm"] for record in run.records()] for run in (plain, z)]
    assert all(abs(a - b) > 0.01 * a for a, b in zip(*norms, strict=True))
    assert "z loss" in z.output


def test_microbatches_change_nothing(train: Any) -> None:
    flags = "--fp64 --z-loss 0.1 --hidden-dropout 0 --attention-dropout 0"
    whole = train("whole", f"{flags} --micro-batch-size 4")
    cut = train("cut", f"{flags} --micro-batch-size 1")
    for key in ("loss", "z_loss"):
        assert [record[key] for record in cut.records()] == pytest.approx(
            [record[key] for record in whole.records()], rel=1e-9
        )
