"""The GEMM sites of a model as modules of NVIDIA's package Transformer Engine, where it is installed.

    norm + qkv                      LayerNormLinear
    proj                            Linear
    norm + fc1, activation + fc2    LayerNormMLP

Each module is made without memory and handed the model's own parameters: their names, their storage and
checkpoints stay what they are under any implementation. Its GEMMs add weight gradients to `main_grad`; those
of norms and biases come through autograd. Attention, residuals, embedding, head and loss stay Redline's.

In fp8 the package's recipe casts, and the package keeps the scales: of delayed scaling it renews them after
every microbatch. Weights are cast in the first microbatch of a step, and kept for the others.

What is data here (`te_modules`, `te_recipe`) is tested without the package; the rest needs it and a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from redline.formulas.shape import ModelShape
from redline.model.block import Block
from redline.model.transformer import Transformer
from redline.precision.fp8 import Fp8Spec, Operand

PACKAGE = "transformer-engine"
ACTIVATIONS = {  # the exact GELU has none: the package computes the tanh formula
    "gelu-tanh": "gelu",
    "geglu": "geglu",
    "quick-geglu": "qgeglu",
    "squared-relu": "srelu",
    "swiglu": "swiglu",
}
STATES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}  # in a module's fp8_meta


@dataclass(frozen=True, slots=True)
class TeModule:
    """How one module is made.

    Attributes:
        kind: its class in transformer_engine.pytorch.
        arguments: of its constructor, beside dtype and device.
        parameters: by its name for a parameter, the model's name within a block.
        num_gemms: how many it computes, as its fp8 state counts them.
    """

    kind: str
    arguments: Mapping[str, Any]
    parameters: Mapping[str, str]
    num_gemms: int = 1


def why_no_engine(device_type: str, shape: ModelShape) -> str | None:
    """Why this model cannot run by the package, or None. Imports it if it is installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"the package {PACKAGE} is not installed"
    if device_type != "cuda":
        return f"the modules of {PACKAGE} run on a GPU alone"
    if shape.activation not in ACTIVATIONS:
        return f"the modules of {PACKAGE} have no activation {shape.activation}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a build that does not fit this PyTorch or driver fails in many ways
        return f"the package {PACKAGE} does not import: {_first_line(error)}"
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:  # it takes a cuDNN of the system or the toolkit before PyTorch's
        return (
            f"the package {PACKAGE} loaded another cuDNN than PyTorch's (LD_LIBRARY_PATH that begins with "
            f"PyTorch's, site-packages/nvidia/cudnn/lib, mends that): {_first_line(error)}"
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else repr(error)


def te_modules(shape: ModelShape, *, fuse_wgrad: bool) -> dict[str, TeModule]:
    """The modules of one block, by the part of it that each stands for.

    Args:
        fuse_wgrad: add weight gradients to `main_grad` inside their GEMMs; else autograd hands them on.
    """
    norm = {
        "eps": shape.norm_epsilon,
        "normalization": shape.normalization,
        "zero_centered_gamma": shape.zero_centered_gamma,
    }
    wgrad = {"fuse_wgrad_accumulation": fuse_wgrad}
    qkv_size = shape.q_size + 2 * shape.kv_size
    return {
        "attention.qkv": TeModule(
            "LayerNormLinear",
            {"in_features": shape.hidden, "out_features": qkv_size, "bias": shape.bias_qkv, **norm, **wgrad},
            _norm_parameters(shape, "attention") | _linear_parameters("", "attention.qkv", shape.bias_qkv),
        ),
        # The residual's kernel adds the bias of proj and fc2.
        "attention.proj": TeModule(
            "Linear",
            {"in_features": shape.q_size, "out_features": shape.hidden, "bias": False, **wgrad},
            _linear_parameters("", "attention.proj", False),
        ),
        "mlp": TeModule(
            "LayerNormMLP",
            {
                "hidden_size": shape.hidden,
                "ffn_hidden_size": shape.ffn,
                "bias": shape.bias_linear,
                "return_bias": shape.bias_linear,
                "activation": ACTIVATIONS[shape.activation],
                **norm,
                **wgrad,
            },
            _norm_parameters(shape, "mlp")
            | _linear_parameters("fc1_", "mlp.fc1", shape.bias_linear)
            | _linear_parameters("fc2_", "mlp.fc2", shape.bias_linear),
            num_gemms=2,
        ),
    }


def _norm_parameters(shape: ModelShape, part: str) -> dict[str, str]:
    names = ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",)
    return {f"layer_norm_{name}": f"{part}.norm.{name}" for name in names}


def _linear_parameters(prefix: str, linear: str, bias: bool) -> dict[str, str]:
    return {f"{prefix}{name}": f"{linear}.{name}" for name in (("weight", "bias") if bias else ("weight",))}


def te_recipe(spec: Fp8Spec) -> tuple[str, dict[str, Any]]:
    """The recipe's class in transformer_engine.common.recipe and its arguments, `fp8_format` by name."""
    form = {"fp8_format": {"hybrid": "HYBRID", "e4m3": "E4M3"}[spec.format]}
    if spec.recipe != "delayed":
        names = {
            "tensorwise": "Float8CurrentScaling",
            "blockwise": "Float8BlockScaling",
            "mxfp8": "MXFP8BlockScaling",
        }
        return names[spec.recipe], form
    history = {"amax_history_len": spec.history_len, "amax_compute_algo": spec.algo}
    return "DelayedScaling", {"margin": spec.margin, **history, **form}


class OwnFn(torch.autograd.Function):
    """y as a tensor of its own: the rotary kernel works in it, which autograd forbids in a module's view."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        own: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Engine:
    """The modules of a model, put in place of its sites.

    Args:
        model: with its parameters on a GPU.
        fuse_wgrad: see `te_modules`.
        in_bf16: numbers of the layers that no recipe applies to.

    Attributes:
        modules: that a recipe applies to, by site, such as "layers.3.attention.qkv".
        num_gemms: how many each computes.
        first: whether the microbatch is the first of its step; None: weights are cast in each.
    """

    def __init__(self, model: Transformer, *, fuse_wgrad: bool, in_bf16: Collection[int] = ()) -> None:
        self.te = importlib.import_module("transformer_engine.pytorch")
        self.modules: dict[str, Any] = {}  # the package states no types
        self.num_gemms: dict[str, int] = {}
        self.first: bool | None = None
        specs = te_modules(model.shape, fuse_wgrad=fuse_wgrad)
        for index, block in enumerate(model.layers):
            assert isinstance(block, Block)
            made = {part: self._make(spec, block) for part, spec in specs.items()}
            plain = index in in_bf16
            for part, spec in specs.items() if not plain else ():
                self.modules[f"layers.{index}.{part}"] = made[part]
                self.num_gemms[f"layers.{index}.{part}"] = spec.num_gemms
            block.attention.qkv_site = self._site(made["attention.qkv"], plain)
            block.attention.proj_site = self._site(made["attention.proj"], plain)
            block.mlp.whole = self._site(made["mlp"], plain)

    def _make(self, spec: TeModule, block: Block) -> Any:
        """The module with the block's parameters in it."""
        weight = block.attention.qkv.weight
        module = getattr(self.te, spec.kind)(**spec.arguments, params_dtype=weight.dtype, device="meta")
        for name, source in spec.parameters.items():
            setattr(module, name, block.get_parameter(source))
        for name in ("bias", "fc1_bias", "fc2_bias"):  # where there is none, it holds an empty tensor
            if hasattr(module, name) and name not in spec.parameters:
                setattr(module, name, weight.new_empty(0))
        return module

    def _site(self, module: Callable[..., Any], plain: bool) -> Callable[[Tensor], Tensor]:
        """What the model calls. A module that returns its bias for others to add returns a pair."""

        def run(x_SBH: Tensor) -> Tensor:
            with self.te.autocast(enabled=False) if plain else nullcontext():
                y = module(x_SBH, is_first_microbatch=self.first)
            own: Tensor = OwnFn.apply(y[0] if isinstance(y, tuple) else y)
            return own

        return run


class EngineFp8:
    """fp8 by one of the package's recipes; offers a step what Fp8Gemms does.

    Args:
        engine: whose modules compute.
        model: whose layers then run inside the recipe's context.
        spec: the options.
        ranks: that share their largest values; None: one process.
    """

    copies_bytes = 0  # the modules keep casts of weights to themselves, and do not say how many

    def __init__(self, engine: Engine, model: Transformer, spec: Fp8Spec, ranks: ProcessGroup | None) -> None:
        self._engine, self.spec, self._ranks = engine, spec, ranks
        recipes = importlib.import_module("transformer_engine.common.recipe")
        name, arguments = te_recipe(spec)
        form = getattr(recipes.Format, arguments["fp8_format"])
        self._recipe = getattr(recipes, name)(**arguments | {"fp8_format": form})
        model.around_layers = self._around
        with self._autocast():
            for site, module in engine.modules.items():
                module.init_fp8_metadata(num_gemms=engine.num_gemms[site])

    @property
    def state(self) -> EngineFp8:
        """What a checkpoint asks."""
        return self

    def begin_step(self, *, looks: bool = False) -> None:
        """Before the first forward of a step."""
        assert not looks, "the rules refuse tables of what casts lose"
        self._engine.first = True

    def prepare(self) -> None:
        """Before an evaluation: its weights are cast as they are read."""
        self._engine.first = None

    def step(self) -> dict[str, Operand]:
        """After the optimizer's update; the package has renewed its scales by itself."""
        return {}

    def forget(self) -> None:
        """After an evaluation, whose values say nothing about training's."""
        for tensor in self._states("amax_history").values():
            tensor[0].zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Views of what a checkpoint holds, by name: scales and histories of delayed scaling."""
        scales, histories = self._states("scale"), self._states("amax_history")
        return {f"fp8.te.scale/{name}": tensor for name, tensor in scales.items()} | {
            f"fp8.te.history/{name}": tensor for name, tensor in histories.items()
        }

    def values(self) -> dict[str, Any]:
        """The state beside tensors, as JSON values."""
        return {
            "engine": te_recipe(self.spec)[0],
            "history_len": self.spec.history_len,
            "sites": list(self._engine.modules),
            "blocks": self.spec.blocks,
            "format": self.spec.format,
            "margin": self.spec.margin,
        }

    def fits(self, values: Mapping[str, Any] | None) -> bool:
        """Whether `values` and the tensors beside them belong to the same modules and recipe."""
        return values == self.values()

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over `values()`: everything that changes is in the tensors."""

    def _states(self, name: str) -> dict[str, Tensor]:
        if self.spec.recipe != "delayed":
            return {}
        return {
            f"{site}.{way}": getattr(module.fp8_meta[key], name)
            for site, module in self._engine.modules.items()
            for way, key in STATES.items()
        }

    def _autocast(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._engine.te.autocast(
            enabled=True, recipe=self._recipe, amax_reduction_group=self._ranks
        )
        return context

    @contextmanager
    def _around(self) -> Iterator[None]:
        """The layers of one forward pass."""
        with self._autocast():
            yield
        if self._engine.first:
            self._engine.first = False
