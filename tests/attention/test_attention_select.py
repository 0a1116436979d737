"""Obeyed or refused: a backend asked for by name runs or fails with the reason; `auto` records its choice."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from redline.attention import BACKENDS, Request, flash_attention, select_backend, unfused_attention
from redline.attention.sdpa import probe
from redline.errors import ConfigError

PLAIN = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 16, "num_heads": 4, "num_groups": 2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_on_a_cpu_is_flash(dtype):
    attention, choice = select_backend("auto", **{**PLAIN, "dtype": dtype})
    assert attention is flash_attention
    assert (choice.asked, choice.ran) == ("auto", "flash") and "not fused: cuDNN needs" in choice.why


@pytest.mark.parametrize(
    ("extra", "reason"), [({"dropout": 0.1}, "dropout"), ({"segments": True}, "document")]
)
def test_dropout_and_segments_take_the_plain_backend(extra, reason):
    attention, choice = select_backend("auto", **PLAIN, **extra)
    assert attention is unfused_attention and choice.ran == "unfused" and reason in choice.why
    with pytest.raises(ConfigError, match=f"(?s)flash cannot run.*{reason}"):
        select_backend("flash", **PLAIN, **extra)


@pytest.mark.parametrize("name", ["unfused", "flash"])
def test_a_named_backend_runs(name):
    attention, choice = select_backend(name, **PLAIN)
    assert attention is BACKENDS[name].run and (choice.asked, choice.ran) == (name, name)
    assert not choice.is_fallback


@pytest.mark.parametrize("name", ["fused", "local", "fastest"])
def test_a_named_backend_that_cannot_run_is_refused(name):
    with pytest.raises(ConfigError, match=f"--attention-backend {name}"):
        select_backend(name, **PLAIN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_choices_on_a_gpu():
    request = {**PLAIN, "device_type": "cuda", "head_dim": 64, "dtype": torch.bfloat16}
    assert select_backend("auto", **request)[1].ran == "fused"
    choice = select_backend("auto", **request, deterministic=True)[1]
    assert choice.ran == "flash" and "deterministic" in choice.why
    assert select_backend("auto", **{**request, "dtype": torch.float32})[1].ran == "unfused"
    with pytest.raises(ConfigError, match="fp16 and bf16, not in float32"):
        select_backend("flash", **{**request, "dtype": torch.float32})
    with pytest.raises(ConfigError, match="PyTorch refuses it: head_dim should be a multiple of 8"):
        select_backend("fused", **{**request, "head_dim": 37})


def test_a_probe_gives_the_reason_each_time_it_is_asked():
    """PyTorch itself says some reasons once a process only; its switch for that is left as it was."""
    request = Request(**PLAIN)
    before = torch.is_warn_always_enabled()
    first, second = (probe(SDPBackend.CUDNN_ATTENTION, request) for _ in range(2))
    assert first == second and first.startswith("PyTorch refuses it: ") and len(first) > 30
    assert probe(SDPBackend.FLASH_ATTENTION, request) is None
    assert torch.is_warn_always_enabled() == before
