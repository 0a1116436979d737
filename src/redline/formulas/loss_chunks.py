"""How the loss without logits cuts its tokens into chunks: one rule, for the kernel and for the formulas."""

from __future__ import annotations

from redline.units import GIB, round_up

LOGITS_BYTES = GIB  # of one chunk
GEMM_TILE = 128  # chunks are multiples of it
ROW_ALIGNMENT = 64  # elements: rows of logits that begin on 128 bytes keep GEMMs and kernel at full width


def logit_columns(vocab_size: int) -> int:
    """Columns of a row of logits as it is stored."""
    return round_up(vocab_size, ROW_ALIGNMENT)


def loss_chunk_tokens(tokens: int, vocab_size: int, item: int) -> int:
    """Tokens a chunk: the fewest equal chunks whose logits, of `item` bytes each, fit in LOGITS_BYTES."""
    most = LOGITS_BYTES // (logit_columns(vocab_size) * item * GEMM_TILE) or 1  # tiles a chunk
    tiles = -(-tokens // GEMM_TILE)
    chunks = -(-tiles // most) or 1
    return (-(-tiles // chunks) or 1) * GEMM_TILE
