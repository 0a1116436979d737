"""What a block keeps for backward is what the table in block.py says; memory formulas stand on it."""

from __future__ import annotations

import pytest
import torch
from model_cases import KINDS, make_batch, make_dropout, make_model, make_shape, saved_tensors

from redline.attention import MaskSpec
from redline.formulas.shape import ModelShape
from redline.model.rope import rope_table

S, B = 16, 2
# Sizes at which no two entries of the table are equal.
WIDE = {"hidden": 64, "ffn": 88, "num_heads": 4, "num_groups": 2, "head_dim": 24, "num_layers": 1}


def per_token_bytes(shape: ModelShape, dtype: torch.dtype, backend: str, on_cpu: bool) -> int:
    """The table of block.py."""
    e, w = dtype.itemsize, max(4, dtype.itemsize)
    H, F, N, G, q, kv = (
        shape.hidden,
        shape.ffn,
        shape.num_heads,
        shape.num_groups,
        shape.q_size,
        shape.kv_size,
    )
    layer_norm = shape.normalization == "LayerNorm"
    normalised = on_cpu and not layer_norm
    total = 2 * (w * H * (1 + normalised) + w * (1 + layer_norm))
    total += 2 * e * H
    qk_normalised = normalised and shape.qk_norm == "norm"
    if shape.qk_norm != "none":
        statistics = 2 if layer_norm and shape.qk_norm == "norm" else 1
        total += w * (q + kv) * ((e < w) + qk_normalised) + w * (N + G) * statistics
    if backend == "unfused":
        sinks = shape.softmax_type != "vanilla"
        total += w * N * (S + sinks) + e * q + e * (q + 2 * kv)
        total += e * N * S * (e < w or shape.attention_dropout > 0) + N * S * (shape.attention_dropout > 0)
        if shape.qk_norm != "none" and e == w:
            total += e * (q + 2 * kv)  # q and k are then read by their norms in place: qkv stays alive
    else:
        total += e * (q + 2 * kv) + e * q + w * N
        if shape.qk_norm != "none" or shape.position == "rope":
            total += e * (q + kv)
    total += e * shape.fc1_size + e * F
    total += e * F * {"quick-geglu": 2, "geglu": 1, "swiglu": 1}.get(shape.activation, 0)
    total += e * F * (2 if shape.activation_clamp else 1 if shape.glu_offset else 0)
    return total + (2 * H if shape.hidden_dropout else 0)


def constant_bytes(shape: ModelShape, dtype: torch.dtype, backend: str) -> int:
    """What the table leaves out."""
    w = max(4, dtype.itemsize)
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm == "norm" else 0)
    wide_copies = norms * w * (2 if shape.normalization == "LayerNorm" else 1) if dtype.itemsize < w else 0
    if shape.zero_centered_gamma and dtype.itemsize == w:
        wide_copies = norms * w
    angles = w * S * shape.rotary_dim if shape.position == "rope" else 0
    return wide_copies + angles + (S * S if backend == "unfused" else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["flash", "unfused", "fused"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_block_saves_what_its_table_says(kind, backend, dtype, device):
    if device == "cpu" and backend == "fused":
        pytest.skip("cuDNN needs an NVIDIA GPU")
    if backend != "unfused" and make_shape(kind).softmax_type != "vanilla":
        pytest.skip("these kernels have no attention sinks")
    if backend == "unfused" and kind.endswith("mqa"):
        pytest.skip("which of q, k and v the products copy then depends on the strides")
    if device == "cuda" and backend != "unfused" and dtype != torch.bfloat16:
        pytest.skip("these kernels compute in half precision")
    changes = {"hidden_dropout": 0.1} if kind.startswith("gpt") else {}
    if kind == "gpt2" and backend == "unfused":
        changes["attention_dropout"] = 0.1
    changes |= {"num_groups": 1 if kind.endswith("mqa") else 2}
    shape = make_shape(kind, **{**WIDE, **changes})
    model = make_model(shape, dtype, device, backend=backend)
    x = torch.randn(S, B, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    rope = rope_table(shape, S, dtype, x.device)
    dropout = make_dropout(shape, make_batch(shape, B, S, device)).layer(0)
    saved = saved_tensors(lambda: model.layers[0](x, rope, MaskSpec(), dropout), model.parameters())
    total = sum(piece.num_bytes for piece in saved)
    table = S * B * per_token_bytes(shape, dtype, backend, device == "cpu")
    difference = total - table - constant_bytes(shape, dtype, backend)
    seeds = 64 if device == "cuda" else 0  # the kernels' own random state, unused
    assert 0 <= difference <= seeds, "\n".join(map(str, [difference / (S * B), *saved]))
