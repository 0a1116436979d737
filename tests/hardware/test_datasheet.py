"""Data sheets: found by whole words, dense rates, and nothing for what we do not know."""

import json
from pathlib import Path

import pytest

from redline.hardware import SHEETS, find_sheet, hardware_named

# Names as drivers print them, and the product each must give.
NAMES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H20": "H20",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A800-SXM4-80GB": "A800 SXM",
    "NVIDIA A10": "A10",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI250X/MI250": "MI250X (one die)",
    # as a person types them
    "h100": "H100 SXM",
    "h100-pcie": "H100 PCIe",
    "a100": "A100 SXM 80GB",
    "rtx4090": "RTX 4090",
}

# Each resembles a listed product and is another one, or part of one.
STRANGERS = (
    "NVIDIA A10G",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H100X",
    "NVIDIA T400",
    "NVIDIA L2",
    "NVIDIA H20-3e",
    "Tesla P100-PCIE-16GB",
    "AMD EPYC 9654",
    "",
)


@pytest.mark.parametrize(("name", "product"), NAMES.items())
def test_names_are_read_as_whole_words(name, product):
    sheet = find_sheet(name)
    assert sheet is not None and sheet.name == product


@pytest.mark.parametrize("name", STRANGERS)
def test_an_unknown_device_has_no_sheet(name):
    assert find_sheet(name) is None
    assert hardware_named(name) is None


def test_no_name_fits_two_sheets_equally():
    for sheet in SHEETS:
        rivals = [
            other for other in SHEETS if other.matches(sheet.words) and len(other.words) == len(sheet.words)
        ]
        assert rivals == [sheet]


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_sheets_are_plausible(sheet):
    """Dense: fp8 is at most about twice bf16, and everything has a source."""
    assert sheet.source and sheet.memory_gib > 8 and sheet.bandwidth_gb_per_s > 200
    half = sheet.tflops["fp16"]
    assert sheet.tflops.get("bf16", half) == half
    assert 1.9 < sheet.tflops.get("fp8", 2 * half) / half < 2.1
    assert sheet.tflops["fp32"] <= half
    newer = sheet.capability is None or sheet.capability >= (8, 0)
    assert ("bf16" in sheet.tflops) == newer


def test_h100_peaks_are_dense():
    """B084: 989.4 in bf16 and 1978.9 in fp8, never the rates with 2:4 sparsity."""
    sheet = find_sheet("NVIDIA H100 80GB HBM3")
    assert sheet.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert sheet.peak_flops["fp8"] == pytest.approx(1978.9e12)


def test_a_machine_known_by_name():
    machine = hardware_named("h200", num_devices=8)
    assert machine.num_devices == 8 and machine.kind == "cuda"
    assert machine.peak("bf16") == pytest.approx(989.4e12) and machine.peak("int3") is None
    assert machine.link_bytes_per_s == 900e9
    assert machine.as_dict()["peak_source"] == machine.peak_source


def test_memory_is_what_cuda_reports_where_that_was_seen():
    """139.8 GiB of an H200, as benchmarks on one recorded, not the 141 of its data sheet."""
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "packed-1b-h200.json"
    seen = json.loads(record.read_text())["card_memory_bytes"]
    assert hardware_named("NVIDIA H200").memory_bytes == seen < 140 << 30
    assert hardware_named("a100").memory_bytes == 80 << 30
