"""Initial weights are a function of (seed, logical name), with Megatron's distributions."""

from __future__ import annotations

import math

import pytest
import torch
from model_cases import KINDS, make_shape

from redline import rng
from redline.attention import unfused_attention
from redline.errors import ShapeError
from redline.formulas.shape import ModelShape
from redline.model import Transformer, init_parameters, init_tensors, logical_tensors, shard_table
from redline.model.random import fill_normal_


def build(shape: ModelShape, dtype=torch.float32, device: str = "cpu", seed: int = 1) -> Transformer:
    model = Transformer(shape, attention=unfused_attention, dtype=dtype)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    init_parameters(model, shape, seed)
    return model


def all_logical(model: Transformer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found |= logical_tensors(name, parameter.data, model.shape)
    return found


def test_elements_follow_the_definition():
    """Box and Muller on the words of rng.philox, in plain floats."""
    key, out = rng.stream_key(3, "init", "x"), torch.empty(11, dtype=torch.float64)
    fill_normal_(out, 0.5, key)
    for element in range(11):
        words = [(word + 0.5) / 2**32 for word in rng.philox(key, (element // 4, 0, 0, 0))]
        radius, angle = words[element % 4 // 2 * 2 : element % 4 // 2 * 2 + 2]
        wave = math.sin if element % 2 else math.cos
        assert out[element].item() == pytest.approx(
            0.5 * math.sqrt(-2 * math.log(radius)) * wave(2 * math.pi * angle)
        )


def test_chunks_do_not_show():
    """A tensor longer than a chunk continues the same stream."""
    key = rng.stream_key(1, "init", "long")
    long, short = torch.empty(3 * 65536 + 5), torch.empty(70000)
    fill_normal_(long, 1.0, key)
    fill_normal_(short, 1.0, key)
    assert torch.equal(long[:70000], short)
    assert long.unique().numel() > 0.99 * long.numel()


@pytest.mark.parametrize("kind", ["gpt2", "llama-1p-mqa", "qwen3"])
def test_padding_and_merging_do_not_show(kind):
    """The same logical tensors whatever the padding of the vocabulary; padded rows are 0."""
    small, large = (build(make_shape(kind, padded_vocab_size=padded)) for padded in (53, 128))
    assert all_logical(small).keys() == all_logical(large).keys()
    for (name, a), b in zip(all_logical(small).items(), all_logical(large).values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(large.embedding.word.weight[53:], torch.zeros(75, 24))


def test_the_draw_of_a_tensor_is_its_own():
    """q lies in a merged matrix, down in a matrix of another name: both are drawn by their logical name."""
    shape = make_shape("llama")
    found = all_logical(build(shape))
    for name, std in (
        ("layers.1.attention.q.weight", shape.init_std),
        ("layers.1.attention.v.weight", shape.init_std),
        ("layers.0.mlp.up.weight", shape.init_std),
        ("layers.0.mlp.down.weight", shape.init_std / 2),  # sqrt(2 L), L = 2
        ("head.weight", shape.init_std),
        ("embedding.word.weight", shape.embedding_init_std),
    ):
        alone = torch.empty_like(found[name])
        fill_normal_(alone, std, rng.stream_key(1, "init", name))
        assert torch.equal(alone, found[name]), name
    assert not torch.equal(found["layers.0.attention.q.weight"], found["layers.1.attention.q.weight"])
    assert not torch.equal(all_logical(build(shape, seed=2))["head.weight"], found["head.weight"])


@pytest.mark.parametrize("kind", list(KINDS))
def test_distributions(kind):
    """Standard deviations within 5 sigma of their estimate; norms are the identity, biases 0."""
    shape = make_shape(kind, hidden=96, ffn=160, num_heads=12, num_groups=12 if kind.startswith("gpt") else 4)
    for name, tensor in all_logical(build(shape)).items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif name.endswith("norm.weight"):
            assert (tensor == (0.0 if shape.zero_centered_gamma else 1.0)).all(), name
        else:
            std = shape.embedding_init_std if name.startswith("embedding") else shape.init_std
            std /= 2 if name.endswith(("proj.weight", "down.weight")) else 1
            n = tensor.numel()
            assert abs(tensor.double().mean()) < 5 * std / n**0.5, name
            assert abs(tensor.double().std() / std - 1) < 5 / (2 * n) ** 0.5, name
            assert abs((tensor.double() / std).pow(4).mean() - 3) < 5 * (96 / n) ** 0.5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_draw_rounded_to_each_dtype(dtype):
    """Main parameters and parameters of a run come from one draw; so do runs of other precisions."""
    shape = make_shape("llama")
    exact, rounded = all_logical(build(shape, torch.float64)), all_logical(build(shape, dtype))
    for name, tensor in exact.items():
        assert torch.equal(tensor.to(dtype), rounded[name]), name
    model = build(shape, dtype)
    main = {name: torch.full_like(p, torch.nan, dtype=torch.float64) for name, p in model.named_parameters()}
    init_tensors(main.items(), shape, seed=1)
    assert all(torch.equal(main[name].to(dtype), p) for name, p in model.named_parameters())


def test_devices_agree_to_rounding(device):
    shape = make_shape("qwen3")
    here, there = all_logical(build(shape, torch.float64)), all_logical(build(shape, torch.float64, device))
    for name, tensor in here.items():
        torch.testing.assert_close(there[name].cpu(), tensor, rtol=1e-14, atol=1e-15)


def test_another_shape_is_refused():
    model = Transformer(make_shape("llama"), attention=unfused_attention, dtype=torch.float32)
    model.to_empty(device="cpu")
    with pytest.raises(ShapeError, match=r"only in the table: .*q_norm"):
        init_parameters(model, make_shape("qwen3", tied=False), 1)
    with pytest.raises(ShapeError, match="cannot hold"):
        init_parameters(model, make_shape("llama", hidden=32), 1)
    assert set(shard_table(model.shape)) == {name for name, _ in model.named_parameters()}
