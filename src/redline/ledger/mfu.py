"""Utilisation that can be compared: numerator, denominator and convention always together.

MFU = model FLOPs per second of one device / that device's dense peak in the compute dtype. Recomputed work is
never in the numerator. A machine without a known peak has no MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redline.formulas.flops import Convention, TokenFlops
from redline.hardware import Hardware
from redline.units import format_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """One MFU with everything that it was made from; rates are of one device."""

    flops_per_s: float
    peak_flops_per_s: float | None
    convention: Convention
    dtype: str
    peak_source: str

    @property
    def value(self) -> float | None:
        """The fraction, None when the peak is not known."""
        return None if self.peak_flops_per_s is None else self.flops_per_s / self.peak_flops_per_s

    def __str__(self) -> str:
        rate = format_flops_per_s(self.flops_per_s)
        counted = f"attention {self.convention}, recompute not counted"
        if self.value is None or self.peak_flops_per_s is None:
            return f"n/a: {rate} of model FLOPs ({counted}), no known {self.dtype} peak"
        peak = format_flops_per_s(self.peak_flops_per_s)
        return (
            f"{self.value:.1%} = {rate} of model FLOPs ({counted}) / {peak} {self.dtype} ({self.peak_source})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "mfu": self.value,
            "flops_per_s": self.flops_per_s,
            "peak_flops_per_s": self.peak_flops_per_s,
            "convention": self.convention,
            "dtype": self.dtype,
            "peak_source": self.peak_source,
        }


def mfu(flops: TokenFlops, tokens_per_s: float, hardware: Hardware, dtype: str) -> Utilisation:
    """Utilisation at `tokens_per_s` tokens per second and device, in the convention of `flops`.

    Args:
        dtype: the compute dtype whose peak is the denominator ("bf16", "fp8", ...).
    """
    return Utilisation(
        flops_per_s=flops.total * tokens_per_s,
        peak_flops_per_s=hardware.peak(dtype),
        convention=flops.convention,
        dtype=dtype,
        peak_source=hardware.peak_source,
    )
