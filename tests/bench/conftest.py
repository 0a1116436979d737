"""Checks of fused operators run on a GPU where there is one, else under Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from mended_interpreter import kernel_device

__all__ = ["kernel_device"]
