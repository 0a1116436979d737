"""AdamW over flat buffers in one pass."""

from redline.kernels.adamw.codes import decode, encode, encode_into, noise_of, round_bf16, salt_of
from redline.kernels.adamw.op import (
    FlatState,
    Hyper,
    Segments,
    adamw_,
    adamw_hyper,
    join_main,
    make_segments,
    split_main,
    supports,
)

__all__ = [
    "FlatState",
    "Hyper",
    "Segments",
    "adamw_",
    "adamw_hyper",
    "decode",
    "encode",
    "encode_into",
    "join_main",
    "make_segments",
    "noise_of",
    "round_bf16",
    "salt_of",
    "split_main",
    "supports",
]
