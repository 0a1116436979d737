"""What the kernel rooms share on PyTorch's side: operator registration, the reasons why not, sizes.

Nothing here imports Triton. A room's op.py imports its kernel.py only inside a launcher, so that a machine
without Triton (or without a GPU) can import every room and run the references.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from redline.errors import ConfigError, ShapeError

Impl = Literal["auto", "triton", "reference"]
FUSED_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))  # of ids and labels
LIBRARY = torch.library.Library("redline", "FRAGMENT")  # torch keeps operators only as long as their library
_HERE: AbstractContextManager[None] = nullcontext()


def lazily(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call: how op.py reaches its launchers."""

    found: Callable[..., Any] | None = None

    def launch(*args: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(module), name)
        return found(*args)

    return launch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, in eager mode without its Python layer for functorch: 2 us of 9 on a host."""
    if is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def operator(schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `redline::<schema>` and return the call that an autograd Function makes.

    Under torch.compile the call is the opaque operator, so that the graph has no break. In eager mode it is
    the launcher itself: the dispatcher's extra passes would cost more host time than the launch.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"redline::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.redline, name).default

    def call(*args: Any) -> Any:
        return op(*args) if is_compiling() else launch(*args)

    call.__doc__ = f"redline::{schema}"
    return call


@functools.cache
def _why_not_on(device: torch.device | str) -> str | None:
    device_type = torch.device(device).type
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cuda":
        return None
    import triton

    if device_type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"the tensors are on {device_type}, and Triton's kernels need an NVIDIA GPU"


def why_not_on(device: torch.device | str) -> str | None:
    """Why Triton cannot run a kernel on this type of device, or None. Triton itself says if it interprets."""
    return _why_not_on(device)


# What torch.compiler.assume_constant_result does, but that imports torch._dynamo: 2 seconds of every start.
why_not_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Why kernels must not run on a CPU though Triton interprets, or None; asked where `why_not_on` has no reason.
why_not_interpreted: Callable[[], str | None] = lazily("redline.kernels.interpreter", "why_not_interpreted")


def no_kernel_for(dtype: torch.dtype) -> str:
    """The reason why not, of a dtype that is none of FUSED_DTYPES."""
    return f"no fused kernel for {dtype} (bf16, fp16 and fp32 have one)"


def why_not(x: Tensor, *others: Tensor | None) -> str | None:
    """Why these tensors cannot go to a fused kernel, or None: device, and dtype of all."""
    if x.dtype not in FUSED_DTYPES:
        return no_kernel_for(x.dtype)
    device = x.device
    for tensor in others:
        if tensor is None:
            continue
        if tensor.dtype not in FUSED_DTYPES:
            return no_kernel_for(tensor.dtype)
        if tensor.device != device:
            return f"the tensors are on different devices ({device} and {tensor.device})"
    return why_not_on(device)


def use_triton(op: str, impl: Impl, reason: str | None) -> bool:
    """Whether the kernel runs. `reason` is what the room's `supports` answered.

    Raises: ConfigError when "triton" was asked for by name and cannot run, or for an unknown `impl`.
    """
    if impl == "auto":
        return reason is None
    if impl == "reference":
        return False
    if impl != "triton":
        raise ConfigError(f"{op}: impl={impl!r} is unknown.", mend='use "auto", "triton" or "reference".')
    if reason is not None:
        raise ConfigError(f"{op}: the Triton kernel cannot run.", reason, 'use impl="auto" or "reference".')
    return True


def require(ok: bool, what: str, why: str = "", mend: str = "") -> None:
    """Raise ShapeError unless `ok`. Messages with values are built by the caller only where that is cheap."""
    if not ok:
        raise ShapeError(what, why, mend)


def as_rows(x: Tensor) -> Tensor:
    """[..., C] -> [rows, C] with unit stride in C: a view where the strides allow one, else a copy."""
    return unit_stride(x if x.dim() == 2 else x.reshape(x.numel() // x.shape[-1], x.shape[-1]))


def unit_stride(x: Tensor) -> Tensor:
    """x with unit stride in its last dim: x itself where it has one, else a copy."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of x's shape: half the host time of torch.empty(x.shape, ...)."""
    if x.is_contiguous() and (dtype is None or dtype == x.dtype):
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic inside an operator: fp32, or fp64 for an fp64 tensor."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _AccumulateInto(torch.autograd.Function):
    """The identity on a parameter; its gradient is added to a given buffer instead of being returned."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad)
        return None, None


def buffer_of(param: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """`main_grad`, but none of a frozen parameter: what a kernel adds there nobody would have asked for."""
    return main_grad if param is not None and param.requires_grad else None


def accumulate_into(param: Tensor, main_grad: Tensor | None) -> Tensor:
    """`param`, whose gradient goes to `main_grad` where one is given, as in a fused backward."""
    return param if main_grad is None else _AccumulateInto.apply(param, main_grad)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch choices of an elementwise kernel over [rows, cols]: the tile of one program, and its warps."""

    block_rows: int
    block_cols: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Launch choices of a persistent kernel that holds whole rows; block_cols is a power of 2.

    The grid is `programs_per_sm` programs on each multiprocessor.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    programs_per_sm: int


@functools.cache
def tile_config(cols: int, elements: int = 1024, width: int = 1024, warps: int = 4) -> TileConfig:
    """`elements` in rows of up to `width` columns, both powers of 2.

    As it stands, a thread has one 16-byte load of bf16 an operand, and an SM many programs. Rooms whose
    kernels do more beside it, or draw, ask for another tile: benchmarks/tune_kernels.py times some.
    """
    block_cols = min(next_power_of_2(cols), width)
    return TileConfig(elements // block_cols, block_cols, warps)


@functools.cache
def num_sms(device_index: int) -> int:
    """Multiprocessors of a GPU; 3 for the interpreter (index -1), enough to meet every multi-program path."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count if device_index >= 0 else 3


def on_nvidia(x: Tensor) -> bool:
    """Whether a kernel on x may use instructions of NVIDIA's that Triton has no name for."""
    return x.is_cuda and torch.version.hip is None


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's, at no cost where it is already."""
    index = x.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def split_qkv(
    qkv_SBX: Tensor, num_heads: int, num_groups: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views [S, B, N, D], [S, B, G, D] and [S, B, G, D] of a projection whose last dim is [q | k | v]."""
    S, B, _ = qkv_SBX.shape
    heads = qkv_SBX.view(S, B, num_heads + 2 * num_groups, head_dim)
    q, k, v = heads.split_with_sizes((num_heads, num_groups, num_groups), 2)
    return q, k, v
