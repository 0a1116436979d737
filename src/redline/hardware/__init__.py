"""Machines: what this one is, what others are, and how fast they can be at most. No torch at import time."""

from redline.hardware.datasheet import SHEETS, DataSheet, find_sheet, hardware_named
from redline.hardware.detect import (
    available_memory,
    detect,
    detect_cpu,
    driver_version,
    glance,
    usable_memory,
)
from redline.hardware.hardware import ADA, AMPERE, BLACKWELL, HOPPER, TURING, Hardware
from redline.hardware.links import MeasuredLinks, card_of, links_of, read_links, write_links
from redline.hardware.measure import measure_gemm_peak, with_measured_peak

__all__ = [
    "ADA",
    "AMPERE",
    "BLACKWELL",
    "HOPPER",
    "SHEETS",
    "TURING",
    "DataSheet",
    "Hardware",
    "MeasuredLinks",
    "available_memory",
    "card_of",
    "detect",
    "detect_cpu",
    "driver_version",
    "find_sheet",
    "glance",
    "hardware_named",
    "links_of",
    "measure_gemm_peak",
    "read_links",
    "usable_memory",
    "with_measured_peak",
    "write_links",
]
