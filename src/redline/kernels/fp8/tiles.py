"""How the casts to fp8 are cut into tiles: what a program takes at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from redline.kernels.common import ceil_div, next_power_of_2, num_sms


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns that a program takes at a time, its warps, and programs an SM (0: one a tile).

    Tiles are taken by rows of `group` of them: what these write transposed then lies side by side. A
    program of the backward takes `steps` tiles, one below another.
    """

    rows: int
    cols: int
    warps: int
    per_sm: int = 0
    group: int = 1
    steps: int = 1

    def within(self, cols: int) -> Tile:
        """The same number of elements, over no more columns than there are."""
        width = min(self.cols, next_power_of_2(cols))
        return replace(self, rows=self.rows * self.cols // width, cols=width)

    def grid(self, rows: int, cols: int, x: Tensor) -> tuple[int]:
        """Programs for a matrix of this size."""
        tiles = ceil_div(rows, self.rows * self.steps) * ceil_div(cols, self.cols)
        return (min(tiles, self.per_sm * num_sms(x.get_device())) if self.per_sm else tiles,)


# Chosen on an H200 among the variants of benchmarks/tune_fp8.py, but for two that have not been timed.
TILES = {
    "cast": Tile(2, 4096, 8),
    "cast both": Tile(128, 128, 8),
    "transpose": Tile(256, 128, 16),
    "activation": Tile(4, 1024, 4),
    "activation backward": Tile(32, 128, 4, group=8),
    # Sums take registers, and cross a program's threads once: small tiles, many of them below one another.
    "biased activation backward": Tile(32, 64, 2, steps=8),
    "biased gated activation backward": Tile(64, 64, 4, group=8),  # not timed
    "blocks": Tile(128, 128, 4),  # whole blocks both ways, of either size
    "squares": Tile(128, 128, 8),  # not timed
    "norm": Tile(4096, 1, 8, per_sm=4),  # elements of whole rows
}


def backward_tile(gated: bool, biased: bool, wide: bool) -> Tile:
    """How an activation's backward is cut. Unless rows are read as words (`wide`), a program takes one tile:
    ptxas keeps the addresses of the next one's values, which leaves no registers for the values."""
    name = "activation backward"
    if biased:
        name = "biased gated activation backward" if gated else "biased activation backward"
    return TILES[name] if wide else replace(TILES[name], steps=1)
