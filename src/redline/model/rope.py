"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with the frequency scaling of Llama 3."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ShapeError
from redline.formulas.shape import ModelShape, RopeScaling
from redline.model.heads import Heads


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine of each position's angles: [S, R/2], R the channels of a head that rotate.

    A pair of channels turns by one angle: (i, i + R/2), or (2i, 2i + 1) when interleaved.
    """

    cos_SP: Tensor
    sin_SP: Tensor
    interleaved: bool


def rope_table(
    shape: ModelShape,
    S: int,
    dtype: torch.dtype,
    device: torch.device,
    positions_S: Tensor | None = None,
) -> RopeTable | None:
    """The angles of S places, or None for a model that does not rotate.

    Args:
        positions_S: the position of each place, where documents are packed; None: 0 to S - 1.

    Computed in float64: in fp32 an angle at position 8192 is already off by 5e-4. Stored in at least fp32.
    """
    if shape.position != "rope":
        return None
    exponent_P = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64, device=device) / shape.rotary_dim
    frequency_P = shape.rotary_base**-exponent_P
    if shape.rope_scaling is not None:
        frequency_P = _scale_frequencies(frequency_P, shape.rope_scaling)
    if positions_S is None:
        positions_S = torch.arange(S, device=device)
    angle_SP = positions_S.double()[:, None] * frequency_P
    wide = torch.promote_types(dtype, torch.float32)
    return RopeTable(angle_SP.cos().to(wide), angle_SP.sin().to(wide), shape.rotary_interleaved)


def _scale_frequencies(frequency_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: stretch wavelengths beyond the original context by `factor`, keep short ones, blend between.

    `turns` is how often a frequency turns within the original context; the blend runs linearly in it, from
    low_freq_factor (all stretched) to high_freq_factor (all kept).
    """
    turns_P = scaling.original_max_positions * frequency_P / (2.0 * math.pi)
    kept_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_P = kept_P.clamp(0.0, 1.0)
    return frequency_P * (kept_P + (1.0 - kept_P) / scaling.factor)


def rope(q_SBND: Tensor, k_SBGD: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, as `rotate` does."""
    return rotate(q_SBND, table), rotate(k_SBGD, table)


def rope_qkv(qkv_SBX: Tensor, heads: Heads, table: RopeTable) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a merged projection into heads, with those of q and k turned; v is a view."""
    q_SBND, k_SBGD, v_SBGD = heads.split(qkv_SBX)
    return *rope(q_SBND, k_SBGD, table), v_SBGD


def rotate(x_SBND: Tensor, table: RopeTable) -> Tensor:
    """Rotate the first R channels of each head in fp32 (fp64 for fp64), round once; the others pass through.

    Shapes: [S, B, N, D] of any strides -> the same, contiguous.
    Raises: ShapeError when the table is for another length or wider than a head.
    """
    S, rotary_dim = table.cos_SP.shape[0], 2 * table.cos_SP.shape[1]
    if x_SBND.shape[0] != S or x_SBND.shape[3] < rotary_dim:
        raise ShapeError(
            f"a rotary table of {S} positions and {rotary_dim} channels was given for {tuple(x_SBND.shape)}.",
            why="it needs one row for each position and at most head_dim channels.",
        )
    turned, passed = x_SBND[..., :rotary_dim], x_SBND[..., rotary_dim:]
    pairs = (-1, 2) if table.interleaved else (2, -1)
    dim = 4 if table.interleaved else 3
    a, b = turned.unflatten(3, pairs).unbind(dim)  # [S, B, N, R/2] each
    cos, sin = table.cos_SP[:, None, None], table.sin_SP[:, None, None]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim).flatten(3).to(x_SBND.dtype)
    return torch.cat((turned, passed), 3) if passed.shape[3] else turned
