"""Bytes of elementwise work: fused is less than plain, and by the factors that were measured."""

from dataclasses import replace

from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes
from redline.formulas.traffic import (
    cast_bytes,
    layer_bytes,
    loss_bytes,
    optimizer_bytes,
    score_bytes,
    update_bytes,
)

LLAMA = ModelShape(
    num_layers=32, hidden=4096, ffn=14336, num_heads=32, num_groups=8, head_dim=128, vocab_size=128256,
    padded_vocab_size=128256, max_positions=8192, activation="swiglu", normalization="RMSNorm",
    position="rope", bias_linear=False, bias_qkv=False, tied=False,
)  # fmt: skip


def total(shape: ModelShape, fused: bool) -> float:
    found = layer_bytes(shape, fused)
    return found.outer_forward + found.outer_backward + found.inner_forward + found.inner_backward


def test_fused_layer_by_hand() -> None:
    """Two norms (2h and 3h elements), two additions (3h) each way; rotary and SwiGLU read and write once."""
    found = layer_bytes(LLAMA, fused=True)
    assert found.outer_forward == 2 * (2 + 3) * 4096 * 2
    assert found.outer_backward == 2 * (3 + 3) * 4096 * 2
    assert found.inner_forward == (28672 + 14336) * 2 + 2 * 5120 * 2
    assert found.inner_backward == (2 * 28672 + 14336) * 2 + 2 * 5120 * 2


def test_plain_layer_costs_about_twice() -> None:
    assert 1.7 < total(LLAMA, fused=False) / total(LLAMA, fused=True) < 3.0
    dropped = replace(LLAMA, hidden_dropout=0.1)
    assert total(dropped, fused=False) > total(LLAMA, fused=False)


def test_bytes_of_an_update() -> None:
    """What bench's cases of the kernel state: fp32; fp32 main parameters; a remainder; moments in 8 bits."""
    halves = {"remainder": True, "param": "bf16"}
    for dtypes, each in (
        (StateDtypes(param="fp32"), 28),
        (StateDtypes(), 30),
        (StateDtypes(**halves, exp_avg="bf16", exp_avg_sq="bf16"), 20),
        (StateDtypes(**halves, exp_avg="fp8", exp_avg_sq="fp8"), 16.125),
    ):
        assert update_bytes(64, dtypes) == 64 * each


def test_other_bytes() -> None:
    assert all(
        one < other for one, other in zip(score_bytes(True, False), score_bytes(False, False), strict=True)
    )
    assert cast_bytes(LLAMA, "delayed") < cast_bytes(LLAMA, "tensorwise")
    assert loss_bytes(fused=True) < loss_bytes(fused=False) / 4
    assert optimizer_bytes(2) < optimizer_bytes(4)
