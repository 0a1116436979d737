"""Which dtypes a run has, and which combinations are refused."""

from __future__ import annotations

import pytest
import torch

from redline.errors import ConfigError
from redline.precision import DTYPES, make_recipe


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_wide_precisions_use_one_dtype_throughout(name):
    recipe = make_recipe(name)
    assert {recipe.compute, recipe.param, recipe.main, recipe.grad} == {DTYPES[name]}
    assert not recipe.loss_scaling


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precisions_keep_main_parameters_and_gradients_in_fp32(name):
    recipe = make_recipe(name)
    assert recipe.compute == recipe.param == DTYPES[name]
    assert recipe.main == recipe.grad == torch.float32
    assert recipe.loss_scaling == (name == "fp16")


def test_gradients_in_bf16_only_under_bf16():
    recipe = make_recipe("bf16", grad_in_bf16=True)
    assert (recipe.grad, recipe.main) == (torch.bfloat16, torch.float32)
    for name in ("fp64", "fp32", "fp16"):
        with pytest.raises(ConfigError, match="--grad-reduce-in-bf16"):
            make_recipe(name, grad_in_bf16=True)


def test_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="fp7"):
        make_recipe("fp7")
