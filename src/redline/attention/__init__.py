"""Attention: one call (spec.py), several backends, and the choice among them (select.py)."""

from redline.attention.calibration import Calibration
from redline.attention.flash import flash_attention
from redline.attention.fused import fused_attention
from redline.attention.local import local_attention
from redline.attention.sdpa import is_sdpa
from redline.attention.select import BACKENDS, select_backend, supports
from redline.attention.spec import Attention, AttentionDropout, MaskSpec, Request
from redline.attention.unfused import fused_softmax, unfused_attention

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionDropout",
    "Calibration",
    "MaskSpec",
    "Request",
    "flash_attention",
    "fused_attention",
    "fused_softmax",
    "is_sdpa",
    "local_attention",
    "select_backend",
    "supports",
    "unfused_attention",
]
