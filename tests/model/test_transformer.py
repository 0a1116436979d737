"""Small whole models in float64: against a plain model written apart, accumulated, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from model_cases import KINDS, gradients, make_batch, make_dropout, make_model, make_shape, run_loss
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from redline.attention import MaskSpec
from redline.errors import ShapeError
from redline.formulas.shape import ModelShape
from redline.model import logical_tensors
from redline.model.rope import rope_table


def plain_parameters(model) -> dict[str, Tensor]:
    """Every logical tensor as a leaf of its own."""
    leaves = {}
    for name, parameter in model.named_parameters():
        for logical, view in logical_tensors(name, parameter.detach(), model.shape).items():
            leaves[logical] = view.clone().requires_grad_()
    return leaves


def plain_forward(shape: ModelShape, p: dict[str, Tensor], tokens: Tensor, positions: Tensor) -> Tensor:
    """The same model with PyTorch alone, batch first, one logical matrix a product: logits [B, S, V]."""

    def norm(x: Tensor, name: str) -> Tensor:
        gain = p[f"{name}.weight"] + (1 if shape.zero_centered_gamma else 0)
        centred = x - x.mean(-1, keepdim=True) if shape.normalization == "LayerNorm" else x
        y = centred * (centred.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt() * gain
        return y + p[f"{name}.bias"] if shape.normalization == "LayerNorm" else y

    def matmul(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def heads(x: Tensor, at: str, which: str) -> Tensor:
        y = matmul(x, f"{at}.{which}").unflatten(-1, (-1, shape.head_dim))
        if which != "v" and shape.qk_norm == "norm":
            y = norm(y, f"{at}.{which}_norm")
        if which != "v" and shape.qk_norm == "l2":
            y = y * (y.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt()
        if which != "v" and shape.position == "rope":
            y = turn(y)
        return y.transpose(1, 2)

    def turn(y: Tensor) -> Tensor:
        R = shape.rotary_dim
        cos, sin = table.cos_SP[:, None], table.sin_SP[:, None]
        first, second = (
            (y[..., 0:R:2], y[..., 1:R:2]) if shape.rotary_interleaved else y[..., :R].chunk(2, -1)
        )
        turned = (first * cos - second * sin, second * cos + first * sin)
        whole = torch.stack(turned, -1).flatten(-2) if shape.rotary_interleaved else torch.cat(turned, -1)
        return torch.cat((whole, y[..., R:]), -1)

    def mlp(x: Tensor, at: str) -> Tensor:
        up = matmul(x, f"{at}.up")
        curve = {
            "gelu": F.gelu,
            "gelu-tanh": lambda z: F.gelu(z, approximate="tanh"),
            "geglu": lambda z: F.gelu(z, approximate="tanh"),
            "squared-relu": lambda z: z.clamp_min(0) ** 2,
            "quick-geglu": lambda z: z * torch.sigmoid(1.702 * z),
            "swiglu": F.silu,
        }[shape.activation]
        if not shape.gated:
            return matmul(curve(up), f"{at}.down")
        gate, limit = matmul(x, f"{at}.gate"), shape.activation_clamp or torch.inf
        gate, up = torch.where(gate > limit, limit, gate), up.clip(-limit, limit)
        return matmul(curve(gate) * (up + shape.glu_offset), f"{at}.down")

    S = tokens.shape[1]
    table = rope_table(shape, S, torch.float64, tokens.device)
    x = p["embedding.word.weight"][tokens]
    if shape.position == "learned_absolute":
        x = x + p["embedding.position.weight"][positions]
    for layer in range(shape.num_layers):
        at = f"layers.{layer}.attention"
        y = norm(x, f"{at}.norm")
        q, k, v = (heads(y, at, which) for which in "qkv")
        k, v = (t.repeat_interleave(shape.num_heads // shape.num_groups, 1) for t in (k, v))
        scores = q @ k.mT * (shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale)
        weights = scores.masked_fill(
            torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1), -torch.inf
        ).exp()
        total = weights.sum(-1, keepdim=True)
        if shape.softmax_type != "vanilla":
            total = total + p.get(f"{at}.sink", x.new_zeros(shape.num_heads)).exp()[:, None, None]
        probs = weights / total
        x = x + matmul((probs @ v).transpose(1, 2).flatten(2), f"{at}.proj")
        x = x + mlp(norm(x, f"layers.{layer}.mlp.norm"), f"layers.{layer}.mlp")
    return norm(x, "final_norm") @ p["embedding.word.weight" if shape.tied else "head.weight"].T


def plain_loss(shape: ModelShape, p: dict[str, Tensor], batch) -> Tensor:
    logits = plain_forward(shape, p, batch.tokens, batch.positions)
    per_token = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return (per_token * batch.weights.flatten()).sum()


def logical_gradients(model) -> dict[str, Tensor]:
    found = {}
    for name, gradient in gradients(model).items():
        found |= logical_tensors(name, gradient, model.shape)
    return found


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("main_grad", [None, torch.float64])
def test_loss_and_every_gradient_equal_a_plain_model(kind, backend, main_grad):
    shape = make_shape(kind)
    model, batch = make_model(shape, main_grad=main_grad, backend=backend), make_batch(shape)
    plain = plain_parameters(model)
    loss, want = run_loss(model, batch), plain_loss(shape, plain, batch)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    loss.backward()
    want.backward()
    got = logical_gradients(model)
    assert got.keys() == plain.keys()
    for name, leaf in plain.items():
        torch.testing.assert_close(
            got[name], leaf.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen3"])
def test_other_precisions_follow_float64(kind, dtype, device):
    """Gradients within a few roundings of the dtype, relative to that parameter's whole gradient."""
    shape = make_shape(kind)
    model = make_model(shape, dtype, device, main_grad=torch.float32)
    batch = make_batch(shape, device=device)
    exact = make_model(shape)
    with torch.no_grad():  # the same rounded weights
        for to, source in zip(exact.parameters(), model.parameters(), strict=True):
            to.copy_(source)
    run_loss(model, batch).backward()
    run_loss(exact, make_batch(shape)).backward()
    want = gradients(exact)
    for name, gradient in gradients(model).items():
        error = (gradient.cpu().double() - want[name]).norm() / want[name].norm()
        # the terms of a gain of q or k cancel: 8 to 12.2 roundings in fp32, by the CPU's instruction set
        roundings = 16 if name.endswith(("q_norm.weight", "k_norm.weight")) else 12
        assert error < roundings * torch.finfo(dtype).eps, (name, error)


def test_microbatches_accumulate(device):
    """Three microbatches of one sample equal one of three, whatever order their backwards run in."""
    shape = make_shape("llama")
    batch = make_batch(shape, device=device)
    whole, parts = make_model(shape, device=device), make_model(shape, device=device, main_grad=torch.float64)
    run_loss(whole, batch).backward()
    losses = [run_loss(parts, batch[row : row + 1]) for row in range(3)]
    for row in (1, 2, 0):
        losses[row].backward()
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-9, atol=1e-11)


def test_tied_embedding_sums_both_gradients():
    """Tied = untied with equal matrices, the two gradients added; and the matrix is one parameter (B052)."""
    tied, untied = make_model(make_shape("llama", tied=True)), make_model(make_shape("llama"))
    assert "head.weight" not in dict(tied.named_parameters())
    with torch.no_grad():
        for name, parameter in tied.named_parameters():
            untied.get_parameter(name).copy_(parameter)
        untied.head.weight.copy_(tied.embedding.word.weight)
    batch = make_batch(tied.shape)
    for model in (tied, untied):
        run_loss(model, batch).backward()
    got, parts = gradients(tied), gradients(untied)
    torch.testing.assert_close(
        got["embedding.word.weight"], parts["embedding.word.weight"] + parts["head.weight"]
    )
    torch.testing.assert_close(got["layers.0.mlp.fc1.weight"], parts["layers.0.mlp.fc1.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_matmul_flops_count_the_head_once_and_no_look_up(tied):
    """B088: a look-up is no matmul; the head is one, tied or not. Backward is twice the forward."""
    shape = make_shape("llama", tied=tied)
    model, batch = make_model(shape, backend="unfused"), make_batch(shape)
    B, S = batch.tokens.shape
    with FlopCounterMode(display=False) as forward:
        loss = run_loss(model, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    H, q, kv = shape.hidden, shape.q_size, shape.kv_size
    matrices = H * (q + 2 * kv) + q * H + H * shape.fc1_size + shape.ffn * H
    per_token = shape.num_layers * (matrices + 2 * S * q) + H * shape.padded_vocab_size
    assert forward.get_total_flops() == 2 * B * S * per_token
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_unfused_weight_gradients_equal_fused_ones():
    shape = make_shape("gpt2")
    batch, models = (
        make_batch(shape),
        [make_model(shape, main_grad=torch.float64, fuse_wgrad=f) for f in (True, False)],
    )
    for model in models:
        run_loss(model, batch).backward()
    torch.testing.assert_close(gradients(models[0]), gradients(models[1]), rtol=1e-10, atol=1e-12)


def test_fp32_residual_connection():
    """A bf16 model with an fp32 residual stream: the GEMMs stay bf16, the sum is not rounded."""
    shape = make_shape("llama", num_layers=8, init_std=0.05)
    batch, errors = make_batch(shape), []
    exact = make_model(shape)
    for residual in (None, torch.float32):
        model = make_model(shape, torch.bfloat16, residual_dtype=residual)
        with torch.no_grad():
            for to, source in zip(exact.parameters(), model.parameters(), strict=True):
                to.copy_(source)
        hidden = model(batch.tokens, batch.positions, MaskSpec())
        assert hidden.dtype == torch.bfloat16
        errors.append((hidden.double() - exact(batch.tokens, batch.positions, MaskSpec())).norm().item())
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_compiled_blocks_equal_eager_ones(kind):
    """Block by block, no graph break, dropout on, two microbatches in flight, main_grad in place."""
    shape = make_shape(kind, hidden_dropout=0.1)
    first, second = make_batch(shape, seed=1), make_batch(shape, seed=2)
    eager = make_model(shape, main_grad=torch.float64)
    compiled = copy.deepcopy(eager)
    for model, twin in zip(eager.parameters(), compiled.parameters(), strict=True):
        twin.main_grad = model.main_grad.clone()
    torch.compiler.reset()
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        losses = [run_loss(model, batch, make_dropout(shape, batch)) for batch in (first, second)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(gradients(compiled), gradients(eager), rtol=1e-10, atol=1e-12)


def test_reset_positions_reach_learned_embeddings_only():
    """Rotary angles count from the start of the sample, whatever the positions say."""
    for kind, changes in (("gpt2", True), ("llama", False)):
        shape = make_shape(kind)
        model, batch = make_model(shape), make_batch(shape)
        straight = model(batch.tokens, batch.positions, MaskSpec())
        reset = model(batch.tokens, batch.positions % 4, MaskSpec())
        assert torch.equal(straight, reset) != changes


def test_segments_keep_documents_apart():
    """Two documents in one sample give what each gives alone, where positions are counted alike."""
    shape = make_shape("gpt2")
    model = make_model(shape, backend="unfused")
    batch = make_batch(shape, 1, 12)
    ids = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model(batch.tokens, positions, MaskSpec(segment_ids_BS=ids))
    for part in (slice(0, 5), slice(5, 12)):
        alone = model(batch.tokens[:, part], positions[:, part], MaskSpec())
        torch.testing.assert_close(packed[part], alone)


def test_evaluation_writes_no_gradient():
    shape = make_shape("llama")
    model = make_model(shape, main_grad=torch.float64)
    with torch.no_grad():
        run_loss(model, make_batch(shape))
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_more_tokens_than_learned_positions_are_refused():
    shape = make_shape("gpt2", max_positions=8)
    batch = make_batch(shape)
    with pytest.raises(ShapeError, match="--max-position-embeddings 8"):
        make_model(shape)(batch.tokens, batch.positions, MaskSpec())
