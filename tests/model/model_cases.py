"""Small models of every kind, and the list of what a computation saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.attention import MaskSpec, Request, select_backend
from redline.formulas.shape import ModelShape, RopeScaling
from redline.model import DropoutState, Ops, Transformer, dropout_keys, init_parameters, local_ops

SIZES = {
    "num_layers": 2,
    "hidden": 24,
    "ffn": 40,
    "num_heads": 4,
    "num_groups": 2,
    "head_dim": 8,
    "vocab_size": 53,
    "padded_vocab_size": 64,
    "max_positions": 32,
    "init_std": 0.2,
    "embedding_init_std": 0.5,
}
GPT = {"num_groups": 4}
LLAMA = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position": "rope",
    "bias_linear": False,
    "bias_qkv": False,
    "tied": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt-untied-1p": {**GPT, "tied": False, "zero_centered_gamma": True, "activation": "gelu"},
    "gpt-nopos": {**GPT, "position": "none", "activation": "squared-relu", "bias_linear": False},
    "llama": LLAMA,
    "llama3": {**LLAMA, "rope_scaling": RopeScaling(original_max_positions=16, factor=4.0)},
    "llama-1p-mqa": {**LLAMA, "zero_centered_gamma": True, "num_groups": 1, "tied": True},
    "qwen2": {**LLAMA, "bias_qkv": True},
    "qwen3": {**LLAMA, "qk_norm": "norm", "tied": True},
    "neox": {**GPT, "position": "rope", "rotary_percent": 0.5, "rotary_interleaved": True, "qk_norm": "norm"},
    "geglu": {**LLAMA, "activation": "geglu", "bias_linear": True, "bias_qkv": True, "qk_norm": "l2"},
    "quick-geglu": {**LLAMA, "activation": "quick-geglu", "softmax_scale": 0.2},
    "limited": {**LLAMA, "activation": "quick-geglu", "activation_clamp": 0.5, "glu_offset": 1.0},
    "shifted": {**LLAMA, "glu_offset": 0.5, "bias_linear": True, "bias_qkv": True},
    "sinks": {**LLAMA, "softmax_type": "learnable"},
    "off-by-one": {**GPT, "softmax_type": "off-by-one"},
}


def make_shape(kind: str, **changes: Any) -> ModelShape:
    return ModelShape(**{**SIZES, **KINDS[kind], **changes})


def make_model(
    shape: ModelShape,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    *,
    main_grad: torch.dtype | None = None,
    backend: str = "auto",
    fuse_wgrad: bool = True,
    ops: Ops | None = None,
    **options: Any,
) -> Transformer:
    """A model with weights; `main_grad` gives every parameter a zeroed buffer of that dtype.

    ops: None for the local ones.
    """
    attention, _ = select_backend(
        backend,
        Request(
            device_type=device,
            dtype=dtype,
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
            num_groups=shape.num_groups,
            dropout=shape.attention_dropout > 0,
            sinks=shape.softmax_type != "vanilla",
        ),
    )
    ops = local_ops(fuse_wgrad=fuse_wgrad) if ops is None else ops
    model = Transformer(shape, attention=attention, dtype=dtype, ops=ops, **options)
    model.to_empty(device=device)
    init_parameters(model, shape, seed=7)
    with torch.no_grad():  # biases and gains that are not trivial, so that a lost one shows
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                wave = torch.arange(parameter.numel(), device=device, dtype=torch.float64)
                parameter += (0.3 * torch.sin(wave + index)).to(dtype)
    for parameter in model.parameters():
        if main_grad is not None:
            parameter.main_grad = torch.zeros_like(parameter, dtype=main_grad)
    return model


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    samples: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def make_batch(shape: ModelShape, B: int = 3, S: int = 11, device: str = "cpu", seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, shape.vocab_size, (B, S + 1), generator=generator)
    weights = torch.rand(B, S, generator=generator)
    weights[:, ::4] = 0.0
    positions = torch.arange(S).expand(B, S)
    parts = (stream[:, :-1], stream[:, 1:], weights, positions, torch.arange(B) + 100)
    return Batch(*(part.to(device) for part in parts))


def make_dropout(shape: ModelShape, batch: Batch, iteration: int = 3, **places: Any) -> DropoutState:
    device = batch.tokens.device
    return DropoutState(
        keys=dropout_keys(5, shape.num_layers, device),
        iteration=torch.tensor(iteration, device=device),
        sample_index_B=batch.samples,
        **places,
    )


def run_loss(model: Transformer, batch: Batch, dropout: DropoutState | None = None, **how: Any) -> Tensor:
    hidden = model(batch.tokens, batch.positions, MaskSpec(), dropout)
    return model.loss(hidden, batch.labels, batch.weights, **how)


def gradients(model: Transformer) -> dict[str, Tensor]:
    """The gradient of every parameter, from main_grad where it has one."""
    found = {}
    for name, parameter in model.named_parameters():
        main_grad = getattr(parameter, "main_grad", None)
        assert main_grad is None or parameter.grad is None, f"{name} has a .grad beside its main_grad"
        found[name] = parameter.grad if main_grad is None else main_grad
    return found


@dataclass(frozen=True)
class Saved:
    """One piece of memory that autograd keeps."""

    saved_as: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    num_bytes: int


def saved_tensors(run: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> list[Saved]:
    """What `run` saves for backward: each storage once, with every shape it was saved as, parameters left
    out.

    A view keeps its whole storage alive, so it is the storage's bytes that count.
    """
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: list[Tensor] = []  # alive until the end, so that no storage's address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in kept:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [
        Saved(
            tuple(dict.fromkeys(tuple(t.shape) for t in group)),
            group[0].dtype,
            group[0].untyped_storage().nbytes(),
        )
        for pointer, group in by_storage.items()
        if pointer not in excluded
    ]
