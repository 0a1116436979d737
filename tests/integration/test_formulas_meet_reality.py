"""The formulas against the model that the trainer builds: parameters, FLOPs, saved activations, state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from redline.attention import MaskSpec, Request, select_backend
from redline.formulas.activations import (
    Held,
    MicrobatchShape,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    total_bytes,
)
from redline.formulas.buckets import ALIGNMENT
from redline.formulas.flops import flops_per_token
from redline.formulas.params import count_parameters, stored_elements
from redline.formulas.shape import ModelShape
from redline.formulas.state import StateDtypes, state_bytes
from redline.model import DropoutState, Transformer, dropout_keys, init_parameters
from redline.model.rope import rope_table
from redline.optim import FlatBuffers
from redline.precision import make_recipe
from redline.run.memory import MemoryMeter

from .tiny import opened, take_steps

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUFFERS = {
    "weights": "param",
    "main_params": "main_param",
    "main_grads": "main_grad",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}


@st.composite
def shapes(draw: Callable[..., Any], largest: int = 70) -> ModelShape:
    """Any dense model, sizes odd and prime among them."""
    groups, vocab = draw(st.integers(1, 3)), draw(st.integers(2, 4 * largest))
    return ModelShape(
        num_layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, largest)),
        ffn=draw(st.integers(1, largest)),
        num_heads=groups * draw(st.integers(1, 3)),
        num_groups=groups,
        head_dim=2 * draw(st.integers(1, 9)),
        vocab_size=vocab,
        padded_vocab_size=vocab + draw(st.integers(0, 50)),
        max_positions=draw(st.integers(17, 64)),
        activation=draw(
            st.sampled_from(["gelu", "gelu-tanh", "squared-relu", "quick-geglu", "geglu", "swiglu"])
        ),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        zero_centered_gamma=draw(st.booleans()),
        position=draw(st.sampled_from(["learned_absolute", "rope", "none"])),
        bias_linear=draw(st.booleans()),
        bias_qkv=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "norm", "l2"])),
        tied=draw(st.booleans()),
    )


def backend(shape: ModelShape, name: str, dtype: torch.dtype) -> Any:
    chosen, _ = select_backend(
        name,
        Request(
            device_type="cpu",
            dtype=dtype,
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
            num_groups=shape.num_groups,
            dropout=shape.attention_dropout > 0,
        ),
    )
    return chosen


def build(shape: ModelShape, attention: str = "unfused", dtype: torch.dtype = torch.float32) -> Transformer:
    """The model on the meta device."""
    return Transformer(shape, attention=backend(shape, attention, dtype), dtype=dtype)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(shapes())
def test_parameters(shape: ModelShape) -> None:
    """The count is what the model holds, less the padding of its vocabulary matrices."""
    held = sum(parameter.numel() for parameter in build(shape).parameters())
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden * (1 if shape.tied else 2)
    assert count_parameters(shape).total == held - padding


@settings(max_examples=30, derandomize=True, deadline=None)
@given(shapes(), st.sampled_from(["fp64", "fp32", "bf16", "fp16"]), st.booleans())
def test_state(shape: ModelShape, precision: str, grad_in_bf16: bool) -> None:
    """Bytes of weights, main parameters, gradients and moments are those of the flat buffers, to the byte."""
    recipe = make_recipe(precision, grad_in_bf16=grad_in_bf16 and precision == "bf16")
    names = {dtype: name for name, dtype in DTYPES.items()}
    main = names[recipe.main]
    dtypes = StateDtypes(
        param=names[recipe.param], main=main, grad=names[recipe.grad], exp_avg=main, exp_avg_sq=main
    )
    model = build(shape, dtype=recipe.compute)
    buffers = FlatBuffers(
        model.named_parameters(), main_dtype=recipe.main, grad_dtype=recipe.grad, device="cpu"
    )
    predicted = state_bytes(stored_elements(shape, ALIGNMENT), dtypes)
    seen: set[int] = set()
    for part, kind in BUFFERS.items():  # main parameters that are no copy lie where the parameters lie
        flats = [flat for flat in buffers.flat(kind) if flat.data_ptr() not in seen]  # type: ignore[arg-type]
        seen.update(flat.data_ptr() for flat in flats)
        assert sum(flat.nbytes for flat in flats) == predicted[part], part


@dataclass(frozen=True)
class Batch:
    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    weights_BS: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.tokens_BS, self.labels_BS, self.positions_BS, self.weights_BS]


def make_batch(shape: ModelShape, B: int, S: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, shape.vocab_size, (B, S), generator=generator) for _ in range(2))
    return Batch(tokens, labels, torch.arange(S).repeat(B, 1), torch.ones(B, S))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(shapes(largest=40), st.integers(1, 3), st.integers(2, 17))
def test_flops(shape: ModelShape, B: int, S: int) -> None:
    """Every product that PyTorch counts, forward and backward, is in the formula, and none besides but one.

    The head also multiplies the padding of its vocabulary, which is no useful work. The unfused attention
    computes all S x S scores, the convention "full". S = 1 is no case: a sum over one key is no product to
    PyTorch.
    """
    model, batch = build(shape), make_batch(shape, B, S)
    model.to_empty(device="cpu")
    init_parameters(model, shape, seed=0)
    flops, tokens = flops_per_token(shape, S, "full"), B * S
    idle = 2 * shape.hidden * (shape.padded_vocab_size - shape.vocab_size)
    with FlopCounterMode(display=False) as forward:
        hidden = model(batch.tokens_BS, batch.positions_BS, MaskSpec())
        loss = model.loss(hidden, batch.labels_BS, batch.weights_BS)
    assert forward.get_total_flops() == (flops.forward + idle) * tokens
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() + backward.get_total_flops() == (flops.total + 3 * idle) * tokens


class Saved:
    """The storages that autograd keeps while it is open, each once; `known` ones are not counted."""

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._kept: list[Tensor] = []  # kept alive, so that no address is used twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def num_bytes(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._kept}
        return sum(storage.nbytes() for place, storage in storages.items() if place not in self._known)


def saved_by_part(shape: ModelShape, run: MicrobatchShape, batch: Batch) -> Iterator[tuple[str, int, int]]:
    """(part, bytes by the formula, bytes that autograd keeps) of embedding, attention, mlp and head."""
    dtype = DTYPES[run.dtype]
    model = build(shape, run.attention, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    FlatBuffers(model.named_parameters(), main_dtype=wide, grad_dtype=wide, device="cpu")
    init_parameters(model, shape, seed=0)
    table = rope_table(shape, run.seq_length, dtype, torch.device("cpu"))
    turned = [] if table is None else [table.cos_SP, table.sin_SP]
    known = [*model.parameters(), *(each.main_grad for each in model.parameters()), *batch.tensors(), *turned]
    drop = DropoutState(
        keys=dropout_keys(0, shape.num_layers, "cpu"),
        iteration=torch.tensor(1),
        sample_index_B=torch.arange(run.micro_batch_size),
    )
    documents = batch.positions_BS // 40 if run.segments else None
    mask, layer = MaskSpec(segment_ids_BS=documents), model.layers[0]
    with Saved(known) as by_embedding:
        x_SBH = model.embedding(batch.tokens_BS, batch.positions_BS, drop.embedding())
    x_SBH = x_SBH.detach().requires_grad_()
    with Saved(known) as by_attention:
        y_SBH, _ = layer.attention(x_SBH, table, mask, drop.layer(0))
    with Saved(known) as by_mlp:
        z_SBH = layer.mlp(y_SBH, drop.layer(0))
    with Saved(known) as by_head:
        z_loss = 0.1 if run.z_loss else 0.0
        model.loss(model.final_norm(z_SBH), batch.labels_BS, batch.weights_BS, z_loss=z_loss)

    always = [*batch.tensors(), *turned]
    layers, by = saved_by_layer(shape, run), {"attention": by_attention, "mlp": by_mlp}
    held = sum(tensor.nbytes for tensor in always) + by_embedding.num_bytes
    yield "embedding", total_bytes(saved_by_embedding(shape, run)), held
    for part, saved in by.items():
        yield part, total_bytes(each for each in layers if each.part == part), saved.num_bytes
    yield "head", total_bytes(saved_by_head(shape, run)), by_head.num_bytes


@st.composite
def large_shapes(draw: Callable[..., Any]) -> ModelShape:
    """Models whose vectors of the hidden size, left out by the formulas, weigh little beside 160 tokens."""
    shape = draw(shapes())
    return replace(
        shape,
        num_layers=1,
        hidden=draw(st.integers(60, 130)),
        ffn=draw(st.integers(60, 260)),
        vocab_size=200,
        padded_vocab_size=256,
        max_positions=220,
        hidden_dropout=draw(st.sampled_from([0.0, 0.1])),
        attention_dropout=draw(st.sampled_from([0.0, 0.0, 0.1])),
    )


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    large_shapes(),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(["unfused", "flash"]),
    st.integers(1, 3),
    st.integers(160, 220),
    st.booleans(),
    st.booleans(),
)
def test_saved_activations(
    shape: ModelShape, dtype: str, attention: str, B: int, S: int, segments: bool, z_loss: bool
) -> None:
    """What each part keeps for backward, within 1 %."""
    if shape.attention_dropout or segments:  # as the trainer chooses
        attention = "unfused"
    run = MicrobatchShape(
        seq_length=S,
        micro_batch_size=B,
        dtype=dtype,
        attention=attention,
        device="cpu",
        segments=segments,
        z_loss=z_loss,
    )
    for part, predicted, found in saved_by_part(shape, run, make_batch(shape, B, S)):
        assert predicted == pytest.approx(found, rel=0.01), f"{part}: {predicted} predicted, {found} saved"


def test_nothing_is_left_out_silently() -> None:
    """Each line of the formulas belongs to one of the parts that are compared above."""
    shape = ModelShape(
        num_layers=2,
        hidden=8,
        ffn=8,
        num_heads=2,
        num_groups=1,
        head_dim=4,
        vocab_size=9,
        padded_vocab_size=9,
        max_positions=8,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    run = MicrobatchShape(seq_length=8, attention="unfused", device="cpu")
    lines: dict[str, tuple[Held, ...]] = {
        "embedding": saved_by_embedding(shape, run),
        "layer": saved_by_layer(shape, run),
        "head": saved_by_head(shape, run),
    }
    parts = {name: {each.part for each in held} for name, held in lines.items()}
    assert parts == {"embedding": {"embedding"}, "layer": {"attention", "mlp"}, "head": {"head"}}


def test_memory_is_read_once_every_forward_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the forward and the backward of each microbatch: two of them a step."""
    seen: list[bool] = []

    def look(meter: MemoryMeter) -> None:
        grads = [param.main_grad for param in run.state.model.parameters()]
        seen.append(any(bool(grad.count_nonzero()) for grad in grads))

    monkeypatch.setattr(MemoryMeter, "after_forward", look)
    run = opened(tmp_path, {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 3})
    take_steps(run, 2)
    assert seen == [False, True] * 2, "gradients are there from the first backward on"
