"""What every attention backend takes and what it may be asked for.

A backend is a function

    attention(q_SBND, k_SBGD, v_SBGD, mask, softmax_scale=..., dropout=...) -> out_SBND

over strided views of the merged projection [S, B, (N + 2G) D]; it makes no copy of them. Query head n reads
the keys and values of group n // (N/G). Softmax and its sums are at least fp32; the output has the input's
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from redline.errors import ShapeError

HALF_DTYPES = (torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16", as PyTorch calls it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """Which keys a query sees: those that pass every condition below.

    A query that sees no key gets zeros, and gives no gradient.

    Attributes:
        causal: only keys at its own position and before.
        segment_ids_BS: int [B, S]; only keys of its own segment, which need not lie together
            (`--reset-attention-mask`). A negative id is padding: it sees nothing. None: no segments.
        window: (left, right): from the key `left` positions before its own to the one `right` after, both
            counted; -1 is without limit. Beside `causal` the right side is at most 0. None: no window.
        cu_seqlens: int32 [L + 1] on the device of the queries; documents packed one after the other into a
            single row (B = 1): document i holds the tokens from cu_seqlens[i] up to cu_seqlens[i + 1], and a
            query sees keys of its own document only. It begins with 0 and never falls. Its length is fixed
            for a run, so that nothing compiles again: the entries left over repeat the total, which makes
            empty documents. The total is S; what pads a row is a document of its own. (Tokens from the total
            on would belong to none: zeros by `unfused` and `local`, undefined by FlashAttention's packages.)
            None: nothing is packed. Not together with `segment_ids_BS`.
        max_seqlen: no document is longer; a Python number that is fixed for a run (else it compiles again).
            A bound is enough; S always is one. Needed with `cu_seqlens`.
    """

    causal: bool = True
    segment_ids_BS: Tensor | None = None
    window: tuple[int, int] | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0

    @property
    def limits(self) -> tuple[int, int]:
        """How many positions before and after its own a query may look; -1 is without limit."""
        left, right = (-1, -1) if self.window is None else self.window
        return left, 0 if self.causal else right


class DropoutCounters(Protocol):
    """What the mask of one microbatch depends on beside its key (layout: rng.py)."""

    @property
    def iteration(self) -> Tensor:
        """int64 [] on the device."""

    @property
    def sample_index_B(self) -> Tensor:  # noqa: N802
        """int64 [B]: the number of each sample."""

    @property
    def queries_S(self) -> Tensor | None:  # noqa: N802
        """int64 [S]: the place of each query in its whole sample; None: in order from 0."""

    @property
    def first_head(self) -> int:
        """The number in the whole model of the first head held here."""


class AttentionDropout(Protocol):
    """Dropout of attention probabilities whose mask is a function of keys and counters (layout: rng.py)."""

    @property
    def probability(self) -> float:
        """The share of probabilities set to zero."""

    @property
    def key(self) -> Tensor:
        """int64 [2]: the two words of the site's key."""

    @property
    def state(self) -> DropoutCounters:
        """The counters."""

    def drop_attention(self, probs_BNST: Tensor) -> Tensor:
        """[B, N, S, S] -> the same with dropped entries 0 and the rest divided by 1 - probability."""


class Attention(Protocol):
    """A backend (see the module's text).

    Args:
        softmax_scale: factor on the products of queries and keys.
        dropout: of the probabilities; None drops nothing.
        softcap: the scaled score s becomes softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); 0: it
            stays.
        sink_N: one more score a query head, neither scaled nor capped, that takes part in the softmax's sum
            and has no value: attention may go nowhere (gpt-oss; 0 everywhere is softmax "off by one").
    """

    def __call__(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        mask: MaskSpec,
        *,
        softmax_scale: float,
        dropout: AttentionDropout | None = None,
        softcap: float = 0.0,
        sink_N: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run will ask of its backend, known before the first step.

    Attributes:
        segments: whether segment ids keep the documents of a sample apart.
        packed: whether documents are packed into one row and told by cu_seqlens.
        window: as in MaskSpec.
        causal: as in MaskSpec.
        dropout: whether probabilities are dropped.
        softcap, sinks: as in Attention.
        deterministic: whether the same input must give the same bits every time.
        fp8: whether the products are to run in fp8.
        flash_version: the FlashAttention that `flash` must be (4, 3 or 2); None: the newest.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_groups: int
    seq_length: int = 128
    batch: int = 1
    causal: bool = True
    dropout: bool = False
    segments: bool = False
    packed: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    deterministic: bool = False
    fp8: bool = False
    flash_version: int | None = None


def check_shapes(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, mask: MaskSpec, sink_N: Tensor | None = None
) -> None:
    """Raises ShapeError unless q, k, v, the mask and the sinks belong to one self-attention."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    if k_SBGD.shape != (S, B, G, D) or v_SBGD.shape != k_SBGD.shape or N % G:
        raise ShapeError(
            f"attention was given q {tuple(q_SBND.shape)}, k {tuple(k_SBGD.shape)}, v {tuple(v_SBGD.shape)}.",
            why="it needs q [S, B, N, D], k and v [S, B, G, D], with N a multiple of G.",
        )
    if mask.cu_seqlens is not None and (B != 1 or mask.max_seqlen < 1 or mask.segment_ids_BS is not None):
        raise ShapeError(
            f"packed attention was given {B} rows, max_seqlen {mask.max_seqlen}"
            f"{'' if mask.segment_ids_BS is None else ', and segment ids too'}.",
            why="documents are packed into one row, told by cu_seqlens alone, none longer than max_seqlen.",
        )
    if mask.window is not None and min(mask.window) < -1:
        raise ShapeError(
            f"a window of {mask.window} is none.", why="each side is a count of keys, or -1 without limit."
        )
    if sink_N is not None and sink_N.shape != (N,):
        raise ShapeError(f"attention was given sinks {tuple(sink_N.shape)}.", why=f"it has {N} query heads.")
