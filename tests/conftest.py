"""Before any test imports Triton: on a machine without a GPU its kernels are interpreted."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
