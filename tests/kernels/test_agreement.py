"""Where a kernel and its plain twin could part: frozen parameters, small integers, tables, lengths."""

from __future__ import annotations

import importlib

import pytest
import torch

from redline.errors import ConfigError, ShapeError
from redline.kernels.adamw import FlatState, adamw_, adamw_hyper, make_segments
from redline.kernels.bias_dropout_add import bias_dropout_add
from redline.kernels.bias_gelu import bias_gelu
from redline.kernels.embedding import embedding
from redline.kernels.layer_norm import add_layer_norm, layer_norm
from redline.kernels.masked_softmax import masked_softmax
from redline.kernels.qk_norm import QKNormParams, qk_norm
from redline.kernels.rms_norm import add_rms_norm, rms_norm
from redline.kernels.rotary import rotary

H = 16


def _qk_norm(x, weight, grad, impl):
    params = QKNormParams(
        q_weight=weight, k_weight=weight, q_weight_main_grad=grad, k_weight_main_grad=grad.clone()
    )
    return qk_norm(x.repeat(1, 1, 3).contiguous(), params, num_heads=1, num_groups=1, head_dim=H, impl=impl)[
        0
    ]


OPERATORS = {
    "rms_norm": lambda x, w, g, impl: rms_norm(x, w, main_grad=g, impl=impl),
    "add_rms_norm": lambda x, w, g, impl: add_rms_norm(x, x, w, main_grad=g, impl=impl)[0],
    "layer_norm": lambda x, w, g, impl: layer_norm(x, w, w, bias_main_grad=g, impl=impl),
    "add_layer_norm": lambda x, w, g, impl: add_layer_norm(x, x, w, w, main_grad=g, impl=impl)[0],
    "bias_gelu": lambda x, w, g, impl: bias_gelu(x, w, main_grad=g, impl=impl),
    "bias_dropout_add": lambda x, w, g, impl: bias_dropout_add(x, w, x, 0.0, None, main_grad=g, impl=impl),
    "qk_norm": _qk_norm,
}


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_frozen_parameter_leaves_its_buffer_alone(device, name, frozen, impl):
    x = torch.randn(3, 2, H, device=device, requires_grad=True)
    weight = torch.ones(H, device=device, requires_grad=not frozen)
    main_grad = torch.zeros(H, device=device)
    OPERATORS[name](x, weight, main_grad, impl).square().sum().backward()
    assert x.grad is not None and (main_grad == 0).all().item() == frozen


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.uint8, 100), (torch.uint8, 300), (torch.int8, 1000)])
def test_gradients_of_small_integers(device, by_kernels, dtype, vocab, monkeypatch):
    """Sorted by the kernels, or as where there are many by PyTorch."""
    kernel = importlib.import_module("redline.kernels.embedding.kernel")
    monkeypatch.setattr(kernel, "RANK_TOKENS", 64 if by_kernels else 0)
    ids = (torch.arange(50) % 40).to(device, dtype)
    weight = torch.randn(vocab, 2, device=device, requires_grad=True)
    main_grad = torch.zeros(vocab, 2, device=device)
    embedding(ids, weight, main_grad=main_grad, impl="triton").sum().backward()
    count = torch.bincount(ids.long(), minlength=vocab)
    assert torch.equal(main_grad, count[:, None].expand(-1, 2).float())


def test_both_tables_of_angles_are_fp32(device):
    x = torch.randn(4, 1, 2, H, device=device)
    cos, sin = torch.randn(4, H // 2, device=device), torch.randn(4, H // 2, device=device)
    for wide in (sin.bfloat16(), sin.double()):
        with pytest.raises(ConfigError, match="table of angles"):
            rotary(x, x.clone(), cos, wide, rotary_dim=H, impl="triton")


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_group_without_hyperparameters_is_refused(device, impl):
    state = FlatState(*(torch.ones(128, device=device) for _ in range(4)))
    hyper = adamw_hyper(step=1, lr=[0.1], weight_decay=[0.0], beta1=0.9, beta2=0.99, eps=1e-8, device=device)
    segments = make_segments((0, 64), (0, 1), 128, device)
    with pytest.raises(ShapeError, match="a segment of group 1, hyperparameters of 1 groups"):
        adamw_(state, hyper, segments, impl=impl)
    assert (state.param == 1).all()


@pytest.mark.parametrize("lengths", [[2**31, 3], [2**40, -1], [5, 2**32 + 3]])
def test_lengths_beyond_32_bits(device, lengths):
    scores = torch.randn(2, 1, 3, 5, device=device)
    found, wanted = (
        masked_softmax(scores, lengths_B=torch.tensor(lengths, device=device), impl=impl)
        for impl in ("triton", "reference")
    )
    torch.testing.assert_close(found, wanted)
