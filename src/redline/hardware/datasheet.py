"""Data sheets of accelerators: dense peak rates, memory, bandwidth, links, each with its source.

Vendors print tensor-core rates "with sparsity", twice the dense rate; every number here is dense, with fp32
accumulation. "fp32" is what a plain fp32 matrix product reaches (no TF32 rounding), "fp64" and "fp32" include
the matrix units where a vendor's library uses them for that dtype.

A device is found by the words of its name, never by a substring: every word must be one the sheet knows, so
"H100 PCIe" is not an "H100", "L40" is not an "L4", a laptop or MIG slice of a listed device is not that
device.
A name that matches no sheet has no sheet: the caller says "n/a".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from redline.hardware.hardware import Hardware

VENDOR_WORDS = frozenset(("NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT"))
TERA = 1e12
GIGA = 1e9
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One product. Rates are per device as torch counts devices.

    Attributes:
        name: how we print it.
        words: all of these must be in the device's name.
        also: these may be in it; any other word means that it is another product.
        tflops: dense TFLOP/s by dtype name.
        memory_gib, bandwidth_gb_per_s: the device's own memory (bandwidth is decimal).
        link_gb_per_s: NVLink, Infinity Fabric: both directions together.
        capability: CUDA compute capability, None for AMD.
        source: where the numbers are printed.
        power_w: the board's power limit as sold; None where the maker lets it be configured.
        pcie_gb_per_s: x16 to the host, one direction.
    """

    name: str
    words: frozenset[str]
    also: frozenset[str]
    tflops: Mapping[str, float] = field(hash=False)
    memory_gib: int
    bandwidth_gb_per_s: float
    link_gb_per_s: float | None
    capability: tuple[int, int] | None
    source: str
    power_w: int | None = None
    pcie_gb_per_s: int = 32

    def matches(self, words: frozenset[str]) -> bool:
        """Whether a device of these words (vendor words left out) is this product."""
        return self.words <= words <= self.words | self.also

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """Dense FLOP/s by dtype name."""
        return MappingProxyType({dtype: rate * TERA for dtype, rate in self.tflops.items()})


def _sheet(
    name: str,
    words: str,
    also: str,
    tflops: Mapping[str, float],
    sizes: tuple[int, float, float | None],
    source: str,
    capability: tuple[int, int] | None = None,
) -> DataSheet:
    memory, bandwidth, link = sizes
    power, pcie = BOARDS.get(name, (None, 32))
    return DataSheet(
        name=name,
        words=frozenset(words.split()),
        also=frozenset(also.split()),
        tflops=MappingProxyType(dict(tflops)),
        memory_gib=memory,
        bandwidth_gb_per_s=bandwidth,
        link_gb_per_s=link,
        capability=capability,
        source=source,
        power_w=power,
        pcie_gb_per_s=pcie,
    )


def _rates(
    fp64: float | None, fp32: float, tf32: float | None, half: float, fp8: float | None
) -> dict[str, float]:
    """Rates of a device whose bf16 and fp16 are equal; None where it has no such unit."""
    rates = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp8": fp8}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, V1.04, table 3"
H100_SHEET = "NVIDIA H100 data sheet (tensor rates halved: printed with sparsity)"
H200_SHEET = "NVIDIA H200 data sheet (tensor rates halved: printed with sparsity)"
AMPERE_SHEET = "NVIDIA A100 80GB data sheet"
V100_SHEET = "NVIDIA V100 data sheet"
BLACKWELL_SHEET = (
    "NVIDIA HGX B200/B300 data sheet, system values over 8 (tensor rates halved: printed with sparsity)"
)
GB200_SHEET = (
    "NVIDIA GB200/GB300 NVL72 data sheet, rack values over 72 (tensor rates halved: printed with sparsity)"
)

H100_SXM = _rates(66.9, 66.9, 494.7, 989.4, 1978.9)
H100_PCIE = _rates(51.2, 51.2, 378.0, 756.0, 1513.0)
HOPPER_NVL = _rates(60.0, 60.0, 417.5, 835.5, 1670.5)
EXPORT_HOPPER = {"fp64": 1.0}
A100 = _rates(19.5, 19.5, 156.0, 312.0, None)
V100_SXM2 = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
V100_PCIE = {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}
MI300 = _rates(163.4, 163.4, 653.7, 1307.4, 2614.9)

# name -> (watts, GB/s of PCIe x16 in one direction), from the same sheets.
BOARDS: Mapping[str, tuple[int | None, int]] = {
    "H100 SXM": (700, 64), "H100 PCIe": (350, 64), "H100 NVL": (400, 64), "H200 SXM": (700, 64),
    "H200 NVL": (600, 64), "H800 SXM": (700, 64), "H800 PCIe": (350, 64), "H20": (400, 64),
    "GH200": (None, 64), "A100 SXM 80GB": (400, 32), "A100 SXM 40GB": (400, 32),
    "A100 PCIe 80GB": (300, 32), "A100 PCIe 40GB": (250, 32), "A800 SXM": (400, 32), "A800 PCIe": (300, 32),
    "A10": (150, 32), "A40": (300, 32), "L4": (72, 32), "L40": (300, 32), "L40S": (350, 32),
    "B200": (1000, 64), "B300": (None, 64), "GB200": (None, 64), "GB300": (None, 64),
    "RTX 3090": (350, 32), "RTX 4090": (450, 32), "RTX 5090": (575, 64), "V100 SXM2 16GB": (300, 16),
    "V100 SXM2 32GB": (300, 16), "V100 PCIe 16GB": (250, 16), "V100 PCIe 32GB": (250, 16),
    "V100S PCIe": (250, 16), "T4": (70, 16), "MI250X (one die)": (None, 32), "MI300X": (750, 64),
    "MI325X": (1000, 64),
}  # fmt: skip

# name -> total_memory that CUDA reports, below what is printed on the card (ECC and firmware take the rest).
MEASURED_BYTES: Mapping[str, int] = {
    "H200 SXM": 150_109_880_320,  # card_memory_bytes of the results in benchmarks/results/
}

SHEETS: tuple[DataSheet, ...] = (
    _sheet("H100 SXM", "H100", "SXM SXM5 80GB HBM3", H100_SXM, (80, 3350, 900), HOPPER_PAPER, (9, 0)),
    _sheet("H100 PCIe", "H100 PCIE", "80GB HBM2E", H100_PCIE, (80, 2039, 600), HOPPER_PAPER, (9, 0)),
    _sheet("H100 NVL", "H100 NVL", "94GB HBM3", HOPPER_NVL, (94, 3938, 600), H100_SHEET, (9, 0)),
    _sheet("H200 SXM", "H200", "SXM SXM5 141GB HBM3E", H100_SXM, (141, 4800, 900), H200_SHEET, (9, 0)),
    _sheet("H200 NVL", "H200 NVL", "141GB HBM3E", HOPPER_NVL, (141, 4800, 900), H200_SHEET, (9, 0)),
    _sheet("H800 SXM", "H800", "SXM SXM5 80GB HBM3", {**H100_SXM, **EXPORT_HOPPER}, (80, 3350, 400),
           "NVIDIA H800 data sheet (H100 with fp64 and NVLink cut)", (9, 0)),
    _sheet("H800 PCIe", "H800 PCIE", "80GB HBM2E", {**H100_PCIE, **EXPORT_HOPPER}, (80, 2039, 400),
           "NVIDIA H800 data sheet (H100 with fp64 and NVLink cut)", (9, 0)),
    _sheet("H20", "H20", "SXM SXM5 96GB HBM3", _rates(1.0, 44.0, 74.0, 148.0, 296.0), (96, 4000, 900),
           "NVIDIA H20 data sheet", (9, 0)),
    _sheet("GH200", "GH200", "96GB 120GB 480GB HBM3", H100_SXM, (96, 4000, 900),
           "NVIDIA GH200 data sheet (tensor rates halved: printed with sparsity)", (9, 0)),
    _sheet("A100 SXM 80GB", "A100", "SXM SXM4 80GB", A100, (80, 2039, 600), AMPERE_SHEET, (8, 0)),
    _sheet("A100 SXM 40GB", "A100 40GB", "SXM SXM4", A100, (40, 1555, 600), AMPERE_SHEET, (8, 0)),
    _sheet("A100 PCIe 80GB", "A100 PCIE", "80GB", A100, (80, 1935, 600), AMPERE_SHEET, (8, 0)),
    _sheet("A100 PCIe 40GB", "A100 PCIE 40GB", "", A100, (40, 1555, 600), AMPERE_SHEET, (8, 0)),
    _sheet("A800 SXM", "A800", "SXM SXM4 80GB", A100, (80, 2039, 400), "NVIDIA A800 data sheet", (8, 0)),
    _sheet("A800 PCIe", "A800 PCIE", "80GB", A100, (80, 1935, 400), "NVIDIA A800 data sheet", (8, 0)),
    _sheet("A10", "A10", "24GB PCIE", _rates(None, 31.2, 62.5, 125.0, None), (24, 600, None),
           "NVIDIA A10 data sheet", (8, 6)),
    _sheet("A40", "A40", "48GB PCIE", _rates(None, 37.4, 74.8, 149.7, None), (48, 696, 112.5),
           "NVIDIA A40 data sheet", (8, 6)),
    _sheet("L4", "L4", "24GB", _rates(None, 30.3, 60.0, 121.0, 242.5), (24, 300, None),
           "NVIDIA L4 data sheet (tensor rates halved: printed with sparsity)", (8, 9)),
    _sheet("L40", "L40", "48GB", _rates(None, 90.5, 90.5, 181.05, 362.0), (48, 864, None),
           "NVIDIA L40 data sheet", (8, 9)),
    _sheet("L40S", "L40S", "48GB", _rates(None, 91.6, 183.0, 362.05, 733.0), (48, 864, None),
           "NVIDIA L40S data sheet", (8, 9)),
    _sheet("B200", "B200", "SXM SXM6 180GB HBM3E", _rates(37.0, 75.0, 1125.0, 2250.0, 4500.0),
           (180, 7700, 1800), BLACKWELL_SHEET, (10, 0)),
    _sheet("B300", "B300", "SXM SXM6 AC LC 270GB 288GB HBM3E", _rates(1.25, 75.0, 1125.0, 2250.0, 4500.0),
           (268, 8000, 1800), BLACKWELL_SHEET, (10, 3)),
    _sheet("GB200", "GB200", "186GB HBM3E", _rates(40.0, 80.0, 1250.0, 2500.0, 5000.0), (186, 8000, 1800),
           GB200_SHEET, (10, 0)),
    _sheet("GB300", "GB300", "279GB 288GB HBM3E", _rates(1.39, 80.0, 1250.0, 2500.0, 5000.0),
           (279, 8000, 1800), GB200_SHEET, (10, 3)),
    _sheet("RTX 3090", "RTX 3090", "24GB", _rates(None, 35.6, 35.6, 71.0, None), (24, 936, 112.5),
           "NVIDIA Ampere GA102 white paper, appendix A (fp32 accumulation)", (8, 6)),
    _sheet("RTX 4090", "RTX 4090", "24GB", _rates(None, 82.6, 82.6, 165.2, 330.3), (24, 1008, None),
           "NVIDIA Ada white paper, appendix A (fp32 accumulation)", (8, 9)),
    _sheet("RTX 5090", "RTX 5090", "32GB", _rates(None, 104.8, 104.8, 209.5, 419.0), (32, 1792, None),
           "NVIDIA RTX Blackwell white paper, appendix A (fp32 accumulation)", (12, 0)),
    _sheet("V100 SXM2 16GB", "V100", "SXM2 16GB", V100_SXM2, (16, 900, 300), V100_SHEET, (7, 0)),
    _sheet("V100 SXM2 32GB", "V100 32GB", "SXM2", V100_SXM2, (32, 900, 300), V100_SHEET, (7, 0)),
    _sheet("V100 PCIe 16GB", "V100 PCIE", "16GB", V100_PCIE, (16, 900, None), V100_SHEET, (7, 0)),
    _sheet("V100 PCIe 32GB", "V100 PCIE 32GB", "", V100_PCIE, (32, 900, None), V100_SHEET, (7, 0)),
    _sheet("V100S PCIe", "V100S PCIE", "32GB", {"fp64": 8.2, "fp32": 16.4, "fp16": 130.0}, (32, 1134, None),
           V100_SHEET, (7, 0)),
    _sheet("T4", "T4", "16GB", {"fp32": 8.1, "fp16": 65.0}, (16, 320, None), "NVIDIA T4 data sheet", (7, 5)),
    _sheet("MI250X (one die)", "MI250X", "MI250 OAM", _rates(47.9, 47.9, None, 191.5, None), (64, 1638, None),
           "AMD Instinct MI250X data sheet, halved: torch sees each of the two dies as a device"),
    _sheet("MI300X", "MI300X", "OAM VF 192GB", MI300, (192, 5300, 896), "AMD Instinct MI300X data sheet"),
    _sheet("MI325X", "MI325X", "OAM VF 256GB", MI300, (256, 6000, 896), "AMD Instinct MI325X data sheet"),
)  # fmt: skip


def name_words(name: str) -> frozenset[str]:
    """The words that tell products apart: upper case, split at anything but letters and digits, no vendor.

    "NVIDIA A100-SXM4-80GB" -> {"A100", "SXM4", "80GB"}.
    """
    spaced = re.sub(r"RTX(?=\d)", "RTX ", name.upper())
    return frozenset(re.findall(r"[A-Z0-9]+", spaced)) - VENDOR_WORDS


def find_sheet(name: str) -> DataSheet | None:
    """The data sheet of the device of this name, most specific first; None when we have none."""
    words = name_words(name)
    found = [sheet for sheet in SHEETS if sheet.matches(words)]
    return max(found, key=lambda sheet: len(sheet.words), default=None)


def hardware_named(name: str, num_devices: int = 1) -> Hardware | None:
    """A machine of `num_devices` devices known by name only ("h100", "A100-SXM4-40GB"); None when unknown.

    For planning on machines that are not this one: memory is what CUDA was seen to report, else the data
    sheet's, which is about 1 % more.
    """
    sheet = find_sheet(name)
    if sheet is None:
        return None
    return Hardware(
        name=sheet.name,
        kind="cuda",
        memory_bytes=MEASURED_BYTES.get(sheet.name, sheet.memory_gib * GIB),
        peak_flops=sheet.peak_flops,
        peak_source=sheet.source,
        bandwidth_bytes_per_s=sheet.bandwidth_gb_per_s * GIGA,
        link_bytes_per_s=None if sheet.link_gb_per_s is None else sheet.link_gb_per_s * GIGA,
        num_devices=num_devices,
        compute_capability=sheet.capability,
        power_w=sheet.power_w,
        pcie_bytes_per_s=sheet.pcie_gb_per_s * GIGA,
    )
