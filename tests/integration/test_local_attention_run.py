"""A whole run of `--attention-backend local` has the losses of the plain steps, whatever attention takes."""

from __future__ import annotations

import pytest

from .test_fused_run import ran, train  # noqa: F401  (the fixture)

EVERYTHING = (
    "--fp32 --group-query-attention --num-query-groups 2 --attention-dropout 0.2 --hidden-dropout 0 "
    "--window-size 5 0 --attn-logit-softcapping 1.5 --softmax-scale 0.4"
)


def test_trains_like_the_plain_steps(train):  # noqa: F811
    """Same dropout masks, same losses: a backward that were wrong would show in the second step."""
    runs = [train(name, f"{EVERYTHING} --attention-backend {name}") for name in ("local", "unfused")]
    assert [ran(run)["attention-backend"] for run in runs] == ["local", "unfused"]
    local, plain = runs
    assert len(local.losses) == 3 and local.losses == pytest.approx(plain.losses, rel=2e-6)
    assert local.valid_losses == pytest.approx(plain.valid_losses, rel=2e-6)
