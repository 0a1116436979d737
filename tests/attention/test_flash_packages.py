"""FlashAttention by its packages: which one is taken, and what each computes, against float64 on a GPU."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch
from kernel_accuracy import assert_no_worse
from mended_interpreter import DEVICE

from redline.attention import Request, packages, unfused_attention
from redline.attention import flash as flash_room
from redline.attention.packages import PACKAGES, bound, refusal, why_not_installed
from redline.attention.probe import Inputs, probe

ON_GPU = Request(
    device_type="cuda", dtype=torch.bfloat16, head_dim=64, num_heads=4, num_groups=2, seq_length=300
)
FEATURES = {
    "plain": {},
    "not causal": {"causal": False},
    "packed": {"packed": True},
    "window": {"window": (64, 0)},
    "packed window": {"packed": True, "window": (64, 0)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "head 128": {"head_dim": 128},
    "deterministic": {"deterministic": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.module)
def test_equals_float64(package, feature):
    request = replace(ON_GPU, **FEATURES[feature])
    if reason := refusal(package, request):
        pytest.skip(reason)
    attention = bound(package, request)
    if reason := probe(attention, request):
        pytest.skip(reason)
    found = []
    for dtype, run in (
        (torch.bfloat16, attention),
        (torch.bfloat16, unfused_attention),
        (torch.float64, unfused_attention),
    ):
        inputs = Inputs(replace(request, dtype=torch.bfloat16), (200, 1, 99), 1)
        inputs.qkv_SBX = inputs.qkv_SBX.detach().to(dtype).requires_grad_()
        if inputs.sink_N is not None:
            wide = torch.promote_types(dtype, torch.float32)  # as the model hands them over
            inputs.sink_N = (inputs.sink_N.detach() + 0.5).to(wide).requires_grad_()
        out = inputs.output(run)
        out.backward(inputs.grad_SBND.to(dtype))
        sink = [] if inputs.sink_N is None else [inputs.sink_N.grad]
        found.append([out.detach(), inputs.qkv_SBX.grad, *sink])
    for three in zip(*found, strict=True):
        assert_no_worse(*three, what=f"{package.name} {feature}")


class Interface(types.ModuleType):
    """Stands for a package of versions 2 or 3: keeps what it is called with."""

    calls: list

    def flash_attn_func(self, q, k, v, **options):
        self.calls.append(("plain", options))
        parts = (each.transpose(0, 1) for each in (q, k, v))
        return flash_room.flash_attention(*parts, Plain(), softmax_scale=options["softmax_scale"]).transpose(
            0, 1
        )

    def flash_attn_varlen_func(self, q, k, v, **options):
        self.calls.append(("packed", options))
        return (torch.zeros_like(q), None)


class Plain:
    causal, segment_ids_BS, window, cu_seqlens, max_seqlen, limits = True, None, None, None, 0, (-1, 0)


def test_versions_3_and_2_are_called_as_they_are_written():
    module = Interface("fake_flash")
    module.calls = []
    for asked in ({}, {"packed": True}, {"window": (3, 0)}):
        request = replace(ON_GPU, device_type="cpu", dtype=torch.float32, seq_length=12, **asked)
        inputs = Inputs(request, (7, 5), 1)
        out = inputs.output(packages._of_interface(module))
        assert out.shape == inputs.grad_SBND.shape
    plain, packed, window = module.calls
    assert plain[0] == window[0] == "plain" and packed[0] == "packed"
    assert plain[1]["window_size"] == (-1, -1) and window[1]["window_size"] == (3, 0)
    assert packed[1]["max_seqlen_q"] == 7 and packed[1]["cu_seqlens_k"].tolist() == [0, 7, 12, 12]
    assert all(each[1]["causal"] and not each[1]["deterministic"] for each in module.calls)


def test_a_package_that_does_not_import_says_why(monkeypatch):
    broken = PACKAGES[0]._replace(module="broken_package_of_a_test")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: object())

    def fail(name):
        raise OSError("libcudart.so.99: cannot open")

    monkeypatch.setattr(packages.importlib, "import_module", fail)
    assert (
        why_not_installed.__wrapped__(broken) == "flash-attn-4 does not import: libcudart.so.99: cannot open"
    )


@pytest.mark.parametrize(
    ("asked", "reason"), [({"dropout": True}, "dropout keys"), ({"segments": True}, "segment ids")]
)
def test_what_no_package_takes(asked, reason, monkeypatch):
    monkeypatch.setattr(packages, "why_not_installed", lambda package: None)
    for package in PACKAGES:
        assert reason in refusal(package, replace(ON_GPU, **asked))
    assert "no attention sinks" in refusal(PACKAGES[-1], replace(ON_GPU, sinks=True))
    assert refusal(PACKAGES[0], replace(ON_GPU, sinks=True)) is None
