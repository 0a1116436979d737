"""Launch choices of the attention kernels, computed from head size, dtype and card, never searched for.

The numbers for 16-bit input on Hopper follow from its registers: a warp group holds 64 rows of a product, so
128 rows by 128 columns over two groups take 64 registers a thread, beside as many for an output of 128
channels. The forward of 128 channels is faster in small programs, two on a multiprocessor: one takes
exponentials while the other multiplies (536 TFLOP/s against 425, on an H200). Warp specialisation is not
used: for Hopper, Triton 3.6 fails to compile these kernels with it, or leaves them as they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from redline.kernels.common import next_power_of_2

INTERPRETER = -1  # the device index of a CPU tensor
L2_BYTES = 32 << 20  # of keys and values that programs running together should share


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch choices of one kernel.

    Attributes:
        queries: rows of the score tile.
        keys: its columns.
        warps: of a program; 4 form the group that feeds a Hopper tensor core.
        stages: tiles on their way from memory, the one in use counted.
        tma: whether tiles are fetched by descriptors, a whole tile an instruction.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of the three kernels, and the power of 2 that holds a head."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles
    block_dim: int


# By the power of 2 that holds a head, for 2-byte input; first, where a program has 227 KiB of shared memory.
_LARGE = {
    64: (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    128: (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
    256: (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
}
_SMALL = {
    64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 8, 2)),
    256: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1)),
}
_WIDE = (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1))  # fp32 runs without tensor cores
_INTERPRETED = (Tiles(16, 32, 1, 1), Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1))


@functools.cache
def launch_of(head_dim: int, itemsize: int, device_index: int) -> Launch:
    """The launch choices for a head of `head_dim` channels of `itemsize` bytes on this device."""
    block_dim = max(16, next_power_of_2(head_dim))
    if device_index == INTERPRETER:
        return Launch(*_INTERPRETED, block_dim)
    if itemsize > 2:
        return Launch(*_WIDE, block_dim)
    large = torch.cuda.get_device_properties(device_index).major in (9, 10)  # Hopper, Blackwell's large cards
    kernels = (_LARGE if large else _SMALL)[max(64, block_dim)]
    tma = large and head_dim * itemsize % 16 == 0
    forward, dq, dkv = (replace(tiles, tma=tma) for tiles in kernels)
    return Launch(forward, dq, dkv, block_dim)


@functools.cache
def section(num_heads: int, repeat: int, bytes_per_group: int) -> int:
    """How many heads run side by side before the next ones begin: as many as share what the L2 cache holds.

    Inside a section the heaviest tiles of all its heads come first, which evens out the end under a causal
    mask. It divides `num_heads` and holds whole groups of `repeat` heads.
    """
    groups = num_heads // repeat
    fitting = max(1, min(groups, L2_BYTES // max(1, bytes_per_group)))
    return repeat * next(each for each in range(fitting, 0, -1) if groups % each == 0)
