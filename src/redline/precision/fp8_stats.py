"""What casts to fp8 did to their operands, as plain rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fp8Row:
    """One operand of one site in one step, on all ranks.

    Attributes:
        site, operand: for example "layers.0.mlp.fc1" and "x", "w" or "dy".
        amax: its largest value.
        scale: that it was multiplied by.
        saturated: the share of values that were cut off, by more than their rounding.
        underflowed: the share of values that were not 0 and became 0.
    """

    site: str
    operand: str
    amax: float
    scale: float
    saturated: float
    underflowed: float

    @property
    def lost(self) -> float:
        """The share of values that went astray."""
        return self.saturated + self.underflowed

    def as_dict(self) -> dict[str, Any]:
        """Its fields as they are written."""
        return asdict(self)


def rows_of(names: Iterable[tuple[str, str]], facts: Iterable[Sequence[float]]) -> list[Fp8Row]:
    """Rows from (amax, scale, values, values cut off, values rounded to 0); no row where nothing was cast."""
    return [
        Fp8Row(*name, amax, scale, cut / values, lost / values)
        for name, (amax, scale, values, cut, lost) in zip(names, facts, strict=True)
        if values
    ]
