"""Ids, labels and positions of every integer dtype, in kernels and twins alike."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.common import INTEGERS
from redline.kernels.cross_entropy import cross_entropy
from redline.kernels.embedding import Positions, embedding
from redline.kernels.linear_cross_entropy import linear_cross_entropy
from redline.kernels.loss_spec import LossSpec
from redline.kernels.rotary import rotary

T, V, H = 7, 100, 16


def _losses(ids, impl):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator).to(ids.device) for n in (T, V))
    spec = LossSpec(V)
    yield cross_entropy(hidden @ weight.t(), ids, spec, impl=impl)
    yield linear_cross_entropy(hidden, weight, ids, spec, impl=impl)


def _looked_up(ids, impl):
    generator = torch.Generator().manual_seed(0)
    words, places = (torch.randn(V, H, generator=generator).to(ids.device) for _ in range(2))
    x_SBND = torch.randn(T, 1, 2, H, generator=generator).to(ids.device)
    cos, sin = (torch.randn(V, H // 2, generator=generator).to(ids.device) for _ in range(2))
    yield embedding(ids, words, positions=Positions(ids, places), impl=impl)
    yield from rotary(x_SBND, x_SBND.clone(), cos, sin, rotary_dim=H, positions_SB=ids[:, None], impl=impl)


@pytest.mark.parametrize("dtype", sorted(INTEGERS - {torch.int64}, key=str), ids=str)
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("operators", [_losses, _looked_up])
def test_any_integer_is_as_good_as_int64(device, dtype, impl, operators):
    ids = torch.tensor([0, 99, 3, 3, 42, 7, 98], device=device)
    for found, wanted in zip(operators(ids.to(dtype), impl), operators(ids, impl), strict=True):
        assert torch.equal(found, wanted)
