"""Before any test imports Triton: on a machine without a GPU its kernels are interpreted."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

import mended_interpreter  # noqa: F401 (it sets what Triton reads when it is imported)
