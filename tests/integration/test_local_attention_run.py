"""A whole run of `--attention-backend local` has the losses of the plain steps, whatever attention takes."""

from __future__ import annotations

import pytest
import torch

from redline.build.kernels import kernel_conditions
from redline.errors import ConfigError
from redline.optim.groups import group_of

from .test_fused_run import ran, train  # noqa: F401  (the fixture)
from .tiny import opened, take_steps

EVERYTHING = (
    "--fp32 --group-query-attention --num-query-groups 2 --attention-dropout 0.2 --hidden-dropout 0 "
    "--window-size 5 0 --attn-logit-softcapping 1.5 --softmax-scale 0.4 --softmax-type learnable"
)


def test_trains_like_the_plain_steps(train):  # noqa: F811
    """Same dropout masks, same losses: a backward that were wrong would show in the second step."""
    runs = train(**{name: f"{EVERYTHING} --attention-backend {name}" for name in ("local", "unfused")})
    assert [ran(run)["attention-backend"] for run in runs] == ["local", "unfused"]
    local, plain = runs
    assert len(local.losses) == 3 and local.losses == pytest.approx(plain.losses, rel=2e-6)
    assert local.valid_losses == pytest.approx(plain.valid_losses, rel=2e-6)


SINKS = {"softmax_type": "learnable", "hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_sinks_are_trained_and_do_not_decay(tmp_path):
    run = opened(tmp_path, SINKS)
    sinks = {name: p for name, p in run.state.model.named_parameters() if name.endswith(".sink")}
    assert {tuple(p.shape) for p in sinks.values()} == {(run.plan.shape.num_heads,)}
    before = {name: p.detach().clone() for name, p in sinks.items()}
    take_steps(run)
    assert all((p != before[name]).all() for name, p in sinks.items())
    assert not any(group_of(name, p.shape).decays for name, p in sinks.items())


def test_what_knows_no_sinks_says_so(tmp_path):
    with pytest.raises(ConfigError, match="PyTorch hands it no attention sinks"):
        opened(tmp_path, {**SINKS, "attention_backend": "flash"})
    plan = opened(tmp_path, {**SINKS, "softmax_type": "off-by-one"}).plan
    limits = kernel_conditions(plan, torch.device("cpu"), "unfused", engine=False, interpret=True).limits
    assert limits["masked_softmax"] == "the kernel knows no attention sinks"
