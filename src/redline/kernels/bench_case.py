"""The shape of a kernel room's bench.py: cases stated as data. bench/ finds, checks and times them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Provider = Callable[..., Any]
Loader = Callable[[], Provider]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One operator at one size. A room's bench.py holds a tuple of them, `CASES`.

    Attributes:
        op: the room, for example "rms_norm".
        name: the size in words, for example "16384 x 4096".
        make_inputs: (device, dtype) -> the positional arguments of every provider, random. Those that require
            a gradient are differentiated; a fresh call gives fresh tensors. A provider may change its inputs
            (rotary works in place), so each is checked on inputs of its own, drawn after the same seed.
        own_inputs: whether each provider is timed on inputs of its own too, as one needs that changes what it
            is given. The others share theirs: where a tensor lies in memory makes 1% of a kernel's time.
        providers: name -> loader. A loader takes nothing and returns the callable that is timed as
            `callable(*make_inputs(...))`, giving a tensor or a tuple of tensors (all differentiable); it
            raises ImportError where its package is missing. Names: "fused", "eager" (the room's reference),
            "compile" (the reference under torch.compile), "liger", "quack", "torch" (PyTorch's own).
        bytes_forward: each input read once and each output written once, in `dtype`, saved statistics too.
        bytes_backward: the same for the backward pass; 0 means the operator has none.
        flops: floating-point operations forward, where arithmetic is the limit; else 0.
        dtype: the dtype in which bytes are counted and the case is run.
        gradient_roundings: to `dtype` on the way to a gradient: 2 where backward starts from the rounded
            result because keeping that costs no memory, while the twin keeps a wide copy.
        quick: whether a quick run takes this case too, besides the room's first one.
        adapted: name -> what that library's provider takes in place of the inputs: the same numbers, laid out
            as it wants them, so that no copy of theirs is timed against a kernel that needs none.
        cut: (inputs, rows) -> the inputs with so many rows left, to measure the host's time; None where those
            are the tensors as long as the first one.
    """

    op: str
    name: str
    make_inputs: Callable[[torch.device, torch.dtype], tuple[Any, ...]]
    providers: Mapping[str, Loader]
    bytes_forward: int
    bytes_backward: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16
    gradient_roundings: int = 1
    quick: bool = False
    own_inputs: bool = False
    adapted: Mapping[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    cut: Callable[[Sequence[Any], int], tuple[Any, ...]] | None = None

    def inputs_of(self, provider: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What this provider is called with."""
        return self.adapted[provider](*inputs) if provider in self.adapted else tuple(inputs)


# How a gate is limited and shifted where that is timed: of standard normal inputs many lie beyond the limit.
LIMITED: dict[str, Any] = {"clamp": 1.0, "offset": 1.0}


def twins(fused: Provider, eager: Provider, **libraries: Loader) -> dict[str, Loader]:
    """The loaders every case has (fused, eager, eager under torch.compile), and those of other libraries."""
    return {
        "fused": lambda: fused,
        "eager": lambda: eager,
        "compile": lambda: torch.compile(eager),
        **libraries,
    }
