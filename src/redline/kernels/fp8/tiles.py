"""How the casts to fp8 are cut into tiles: what a program takes at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from redline.kernels.common import ceil_div, next_power_of_2, num_sms


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns that a program takes at a time, its warps, and programs an SM (0: one a tile).

    Tiles are taken by rows of `group` of them: what these write transposed then lies side by side. A thread
    is held to so many `registers` where that lets more programs share an SM.
    """

    rows: int
    cols: int
    warps: int
    per_sm: int = 0
    group: int = 1
    registers: int | None = None

    def within(self, cols: int) -> Tile:
        """The same number of elements, over no more columns than there are."""
        width = min(self.cols, next_power_of_2(cols))
        return replace(self, rows=self.rows * self.cols // width, cols=width)

    def grid(self, rows: int, cols: int, x: Tensor) -> tuple[int]:
        """Programs for a matrix of this size."""
        tiles = ceil_div(rows, self.rows) * ceil_div(cols, self.cols)
        return (min(tiles, self.per_sm * num_sms(x.get_device())) if self.per_sm else tiles,)


# Chosen on an H200 among the variants of benchmarks/tune_fp8.py.
TILES = {
    "cast": Tile(2, 4096, 8),
    "cast both": Tile(64, 128, 8, group=4),
    "transpose": Tile(256, 128, 16),
    "activation": Tile(4, 1024, 4),
    "activation backward": Tile(64, 128, 8, group=8),
    "biased activation backward": Tile(64, 64, 8, group=8),  # its sums take registers
    "blocks": Tile(128, 128, 8, registers=64),  # whole blocks both ways, of either size
    "squares": Tile(128, 128, 8),
    "norm": Tile(4096, 1, 8, per_sm=4),  # elements of whole rows
}
