"""How the casts to fp8 are cut into tiles: what a program takes at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from redline.kernels.common import ceil_div, next_power_of_2, num_sms


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns that a program takes at a time, its warps, and programs an SM (0: one a tile).

    What writes q^T takes tiles by rows of `group` of them (0: by columns of tiles): what these write
    transposed then lies side by side.
    """

    rows: int
    cols: int
    warps: int
    per_sm: int = 0
    group: int = 1

    def within(self, cols: int) -> Tile:
        """The same number of elements, over no more columns than there are."""
        width = min(self.cols, next_power_of_2(cols))
        return replace(self, rows=self.rows * self.cols // width, cols=width)

    def grid(self, rows: int, cols: int, x: Tensor) -> tuple[int]:
        """Programs for a matrix of this size."""
        tiles = ceil_div(rows, self.rows) * ceil_div(cols, self.cols)
        return (min(tiles, self.per_sm * num_sms(x.get_device())) if self.per_sm else tiles,)

    def groups(self, rows: int, cols: int) -> tuple[int, int]:
        """Programs of a tile each, as device.corner counts them; some of the last group may have no rows.

        A GPU takes 65,535 groups: more than 8 million rows (or columns, where the tiles go by these).
        """
        if self.group == 0:
            return ceil_div(rows, self.rows), ceil_div(cols, self.cols)
        return ceil_div(cols, self.cols) * self.group, ceil_div(rows, self.rows * self.group)


# Chosen on an H200 among the variants of benchmarks/tune_fp8.py.
TILES = {
    "cast": Tile(2, 4096, 8),
    "cast both": Tile(128, 128, 8),
    "transpose": Tile(256, 128, 4, group=0),
    "ragged transpose": Tile(256, 128, 8, group=0),  # masks and bytes read alone take registers
    "activation": Tile(4, 1024, 4),
    "activation backward": Tile(128, 64, 8),
    "biased activation backward": Tile(128, 64, 8, group=2),
    "biased gated activation backward": Tile(64, 64, 4, group=2),
    "blocks": Tile(128, 128, 4),  # whole blocks both ways, of either size
    "squares": Tile(128, 128, 8),  # their size is the format's: only the warps are a choice
    "norm": Tile(4096, 1, 8, per_sm=4),  # elements of whole rows
}


def backward_tile(gated: bool, biased: bool) -> Tile:
    """How an activation's backward is cut."""
    if not biased:
        return TILES["activation backward"]
    return TILES["biased gated activation backward" if gated else "biased activation backward"]
