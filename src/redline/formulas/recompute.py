"""Which activations a run drops in forward and computes again in backward, decided: Megatron's choices.

    selective   in every layer, some modules:
                    core_attn    attention's products and softmax, from q, k, v
                    layernorm    the outputs of both norms, rebuilt just before the GEMM that reads them
                    activation   the activation's output, likewise
                    mlp          the whole MLP, norm and residual included, from the residual stream
    full        whole layers, in units that keep their input alone:
                    uniform      units of N layers, the last one shorter
                    block        the first N layers one by one; the others keep everything

The layers are those of one model chunk: of a pipeline stage, or of a virtual stage.
Source: Korthikanti et al. 2022, arXiv 2205.05198; the selection is Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Module = Literal["core_attn", "layernorm", "activation", "mlp"]
MODULES: tuple[Module, ...] = get_args(Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is dropped. The default drops nothing.

    Attributes:
        modules: of every layer that is in no unit.
        unit: layers of a unit; 0 makes no units.
        layers: how many layers, from the first, are in units; None: all.
        spread: each tensor-parallel rank keeps its part of a unit's input, and they gather it in backward.
    """

    modules: frozenset[Module] = frozenset()
    unit: int = 0
    layers: int | None = None
    spread: bool = False

    def units(self, num_layers: int) -> tuple[range, ...]:
        """The units of a chunk of so many layers: ranges that keep their input alone."""
        if not self.unit:
            return ()
        covered = num_layers if self.layers is None else min(self.layers, num_layers)
        return tuple(range(first, min(first + self.unit, covered)) for first in range(0, covered, self.unit))

    def drops(self, module: Module) -> bool:
        """Whether a layer outside units drops what this module makes."""
        return module in self.modules

    def __str__(self) -> str:
        """The choice in the words of the flags, for people."""
        parts = []
        if self.unit:
            covered = "all layers" if self.layers is None else f"the first {self.layers} layers"
            spread = ", their inputs spread over tp ranks" if self.spread else ""
            parts.append((f"{covered} in units of {self.unit}" if self.unit > 1 else covered) + spread)
        if self.modules:
            parts.append(", ".join(name for name in MODULES if name in self.modules))
        return " and ".join(parts) or "nothing"


NOTHING = Recompute()


def full(method: str, num_layers: int, spread: bool = False) -> Recompute:
    """`--recompute-granularity full`: uniform units of `num_layers`, or a block of so many first layers."""
    if method == "uniform":
        return Recompute(unit=num_layers, spread=spread)
    return Recompute(unit=1, layers=num_layers, spread=spread)


def selective(modules: Iterable[Module]) -> Recompute:
    """`--recompute-granularity selective`. What `mlp` drops includes what the others would in the MLP."""
    return Recompute(modules=frozenset(modules))
