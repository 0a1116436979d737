"""Random numbers on tensors: Philox 4x32-10, normal draws for weights, and dropout masks.

Every number is a function of what it is for (rng.py says how keys and counters are laid out), so a mask or
a weight is the same however the model is split over devices, recomputed or resumed, and no generator state
exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.rng import (
    ATTENTION_LANES,
    HIDDEN_LANES,
    MASK32,
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    Lanes,
    stream_key,
)

Word = Any  # an int64 tensor of 32-bit words, or one such word as an integer; all broadcast
Words = tuple[Word, Word, Word, Word]

# The dropout sites of a layer, and the one of the embedding, are columns of the table of keys.
ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT = range(3)
EMBEDDING = 0
_SITE_NAMES = ("attention", "attention_output", "mlp_output")


def philox(key: tuple[Word, Word], counter: Words) -> Words:
    """Philox 4x32-10, as in rng.py, element by element.

    A product of two words wraps in int64, but its 64 bits are right: the high word needs only the mask.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (
            (product1 >> 32 & MASK32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32 & MASK32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0, k1 = k0 + PHILOX_W0 & MASK32, k1 + PHILOX_W1 & MASK32
    return c0, c1, c2, c3


def normal_blocks(key: tuple[int, int], block_K: Tensor) -> Tensor:
    """Four independent standard normals a block: [K] int64 -> [K, 4] float64, by Box and Muller (1958).

    A word w stands for the uniform number (w + 1/2) / 2^32: no logarithm of zero, and |normal| < 6.77.
    """
    words = philox(key, (block_K & MASK32, block_K >> 32, 0, 0))
    u0, u1, u2, u3 = (word.double().add_(0.5).mul_(2.0**-32) for word in words)
    normals = []
    for radius_u, angle_u in ((u0, u1), (u2, u3)):
        radius, angle = (-2.0 * radius_u.log()).sqrt(), 2.0 * math.pi * angle_u
        normals += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(normals, dim=-1)


def fill_normal_(
    out: Tensor,
    std: float,
    key: tuple[int, int],
    offset: Sequence[int] = (0, 0),
    columns: int | None = None,
) -> None:
    """Fill a contiguous tensor with N(0, std^2); element e of the whole is normal e % 4 of block e // 4.

    Computed in float64 and rounded once, so the values are the same in every dtype and, but for the last
    bit of the logarithm and the cosine, on every device. Works in chunks: a CPU stays in its cache, a GPU
    stays busy.

    Args:
        offset, columns: row and column at which a matrix begins in a whole one of so many columns; None: it
            has all of them.
    """
    out_RC = out.view(-1, out.shape[-1])
    row, column = offset
    C = out_RC.shape[1] if columns is None else columns
    rows_at_once = max((1 << (24 if out_RC.is_cuda else 16)) // C, 1)
    for start in range(0, len(out_RC), rows_at_once):
        part = out_RC[start : start + rows_at_once]
        first, count = (row + start) * C, len(part) * C
        block_K = torch.arange(first // 4, (first + count + 3) // 4, device=out_RC.device)
        drawn = normal_blocks(key, block_K).mul_(std).view(-1)[first % 4 : first % 4 + count]
        part.copy_(drawn.view(-1, C)[:, column : column + part.shape[1]])


def dropout_keys(seed: int, num_layers: int, device: torch.device | str) -> Tensor:
    """The Philox keys of every dropout site: int64 [1 + num_layers, 3, 2], the embedding's row first.

    Made once a run and kept on the device: the step then reads keys without hashing or copying from the host.
    """
    rows = ("embedding", *range(num_layers))
    keys = [[stream_key(seed, "dropout", row, name) for name in _SITE_NAMES] for row in rows]
    return torch.tensor(keys, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutState:
    """All that the dropout masks of one microbatch depend on. Evaluation passes None in its place.

    Attributes:
        keys: of `dropout_keys`; [3, 2] once narrowed to one layer.
        iteration: int64 [], on the device.
        sample_index_B: int64 [B], the number of each sample in the run's data order.
        positions_S: int64 [S], the place in the whole sample of each row of the residual stream held here;
            None: rows 0 to S - 1.
        queries_S: the same of each row that attention holds.
        first_head: the number in the whole model of the first attention head held here.
    """

    keys: Tensor
    iteration: Tensor
    sample_index_B: Tensor
    positions_S: Tensor | None = None
    queries_S: Tensor | None = None
    first_head: int = 0

    def layer(self, index: int) -> DropoutState:
        """The state that layer `index` is handed."""
        return replace(self, keys=self.keys[index + 1])

    def embedding(self) -> DropoutState:
        """The state that the embedding is handed."""
        return replace(self, keys=self.keys[0])


def dropout_at(state: DropoutState | None, site: int, probability: float) -> Dropout | None:
    """The dropout of one site of a layer, or None where nothing is dropped."""
    if state is None or probability == 0.0:
        return None
    return Dropout(state, state.keys[site], probability)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout at one site of one layer in one microbatch."""

    state: DropoutState
    key: Tensor
    probability: float

    def drop_hidden(self, x_SBH: Tensor) -> Tensor:
        """Drop elements of [S, B, H]; the counter is the element's place in the whole sample [S, H]."""
        S, _, H = x_SBH.shape
        keep_BSH = self.keep(_places(self.state.positions_S, S, x_SBH.device), H, HIDDEN_LANES)
        return self._drop(x_SBH, keep_BSH.transpose(0, 1), HIDDEN_LANES)

    def drop_attention(self, probs_BNST: Tensor) -> Tensor:
        """Drop elements of [B, N, S, T]; the counter is the place in the whole sample's [N, T, T]."""
        _, N, S, T = probs_BNST.shape
        device = probs_BNST.device
        head_N = torch.arange(self.state.first_head, self.state.first_head + N, device=device)
        row_NS = head_N[:, None] * T + _places(self.state.queries_S, S, device)
        keep_BNST = self.keep(row_NS.flatten(), T, ATTENTION_LANES).unflatten(1, (N, S))
        return self._drop(probs_BNST, keep_BNST, ATTENTION_LANES)

    def keep(self, row_R: Tensor, row_size: int, lanes: Lanes) -> Tensor:
        """Which elements survive: bool [B, R, row_size], for rows `row_R` of a sample of [rows, row_size]."""
        first_R, L = row_R * row_size, lanes.in_block
        aligned = row_size % L == 0  # each row starts on a block
        num_blocks = row_size // L if aligned else (row_size + 2 * (L - 1)) // L
        block_RK = first_R[:, None] // L + torch.arange(num_blocks, device=row_R.device)
        sample_B11 = self.state.sample_index_B[:, None, None]
        counter = (block_RK & MASK32, block_RK >> 32, sample_B11 & MASK32, self.state.iteration & MASK32)
        words = philox((self.key[0], self.key[1]), counter)
        threshold, mask = lanes.threshold(self.probability), (1 << lanes.bits) - 1
        kept = [(word >> low & mask) >= threshold for word in words for low in range(0, 32, lanes.bits)]
        keep_BRE = torch.stack(kept, dim=-1).flatten(-2)
        if aligned:
            return keep_BRE
        index_RE = first_R[:, None] % L + torch.arange(row_size, device=row_R.device)
        return keep_BRE.gather(-1, index_RE.expand(keep_BRE.shape[0], -1, -1))

    def _drop(self, x: Tensor, keep: Tensor, lanes: Lanes) -> Tensor:
        return torch.where(keep, x * lanes.scale(self.probability), 0.0)


def _places(held_S: Tensor | None, S: int, device: torch.device) -> Tensor:
    """The place in the whole sample of each of the S rows held here."""
    return torch.arange(S, device=device) if held_S is None else held_S
