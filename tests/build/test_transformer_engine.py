"""What a run with NVIDIA's modules is refused before one of them is made."""

from __future__ import annotations

import shlex

import pytest

from redline.build.assemble import make_engine
from redline.comm import Groups
from redline.config import parse_args
from redline.errors import ConfigError
from redline.hardware import hardware_named
from redline.model import Transformer
from redline.plan import make_plan

BASE = (
    "--transformer-impl transformer_engine --num-layers 3 --hidden-size 64 --num-attention-heads 4 "
    "--ffn-hidden-size 192 --seq-length 64 --train-iters 1 --bf16"
)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seq-length 50", ("cannot take 50 tokens in fp8", "multiples of 32", "--transformer-impl fused")),
        (
            "--ffn-hidden-size 120",
            ("cannot run these layers in fp8", "no multiple of 16", "into fp8 together"),
        ),
        ("--fp8-format e4m3 --fp8-recipe blockwise --hidden-size 128", ("no multiple of 128",)),
    ],
)
def test_what_fp8_cannot_take(words, says):
    config = parse_args(shlex.split(f"{BASE} --fp8-format hybrid {words}")).config
    plan = make_plan(config, hardware_named("h200"), 100)
    model = Transformer(plan.shape, attention=None, dtype=None)
    with pytest.raises(ConfigError) as caught:
        make_engine(config, plan, model, Groups())
    assert all(each in str(caught.value) for each in says), str(caught.value)
