"""What a machine can do at most: the denominator of every utilisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

DeviceKind = Literal["cpu", "cuda"]

# Compute capabilities with which NVIDIA's generations begin: bf16 units come with Ampere, fp8 units with Ada.
TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device and how many of it this process can see.

    Attributes:
        name: as the driver or the kernel names it.
        kind: "cuda" (also ROCm, as in torch) or "cpu".
        peak_flops: dtype name ("fp64" "fp32" "tf32" "bf16" "fp16" "fp8") -> dense FLOP/s of one device.
            A dtype that is missing has no known peak: utilisation is then "n/a", never a guess.
        peak_source: where the peaks come from, "" when there are none.
        memory_bytes: what one device can hold (a CPU: what this process may use).
        bandwidth_bytes_per_s: main memory of one device, None when unknown.
        link_bytes_per_s: device-to-device links of one device, both directions together, None when unknown.
        num_devices: devices of this kind that are visible (a CPU counts as one).
        cores: CPU cores this process may use.
        compute_capability: (major, minor) of an NVIDIA device.
        power_w: the board's power limit as sold, None when unknown.
        pcie_bytes_per_s: PCIe to the host, one direction, None when unknown.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    peak_source: str = ""
    bandwidth_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    num_devices: int = 1
    cores: int = 1
    compute_capability: tuple[int, int] | None = None
    power_w: int | None = None
    pcie_bytes_per_s: float | None = None

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of one device for GEMMs in `dtype`, or None when it is not known."""
        return self.peak_flops.get(dtype)

    def with_peak(self, dtype: str, flops_per_s: float, source: str) -> Hardware:
        """The same machine with the peak of `dtype` set, and `source` added to where peaks come from."""
        sources = [text for text in (self.peak_source, source) if text]
        return replace(
            self,
            peak_flops=MappingProxyType({**self.peak_flops, dtype: flops_per_s}),
            peak_source="; ".join(dict.fromkeys(sources)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "num_devices": self.num_devices,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "compute_capability": list(self.compute_capability) if self.compute_capability else None,
            "power_w": self.power_w,
            "pcie_bytes_per_s": self.pcie_bytes_per_s,
            "peak_flops": dict(self.peak_flops),
            "peak_source": self.peak_source,
        }
