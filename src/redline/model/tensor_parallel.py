"""What tensor parallelism needs to know inside the model: who shares it, what travels, what is held here.

Each rank holds some heads and some ffn features of every layer, and some rows of the vocabulary. A GEMM that
splits output features ("column") multiplies the same input on every rank; one that splits input features
("row") gives partial sums. With sequence parallelism everything between a row GEMM and the next column GEMM
holds only this rank's part of the sequence, [S/tp, B, H]: the sum becomes a reduce-scatter, and an all-gather
stands before the column GEMM.

Sources: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redline.comm.collectives import all_gather, own_part
from redline.comm.groups import Group
from redline.comm.linked_gemm import LinkedGemm, Plain
from redline.comm.pairs import copy_to, gather_rows, sum_over, sum_rows
from redline.formulas.shape import ModelShape, TpRank
from redline.model.random import DropoutState

PLAIN = Plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The tensor-parallel axis as the model uses it. The default, one rank, sends nothing.

    Attributes:
        group: the ranks that share the model's matrices.
        sequence: whether they also share the sequence (`--sequence-parallel`).
        gather_gemm, gemm_scatter: what joins a gather, or a scatter, to its GEMM.
        bulk_wgrad: gather the input that a weight gradient needs behind the GEMM of the input's gradient.
        bulk_dgrad: send the input's gradient behind the GEMM of the weight gradient.
        scatter_dgrad: scatter the input's gradient by `gemm_scatter` instead.
    """

    group: Group = field(default_factory=Group)
    sequence: bool = False
    gather_gemm: LinkedGemm = PLAIN
    gemm_scatter: LinkedGemm = PLAIN
    bulk_wgrad: bool = True
    bulk_dgrad: bool = True
    scatter_dgrad: bool = False

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.group.index

    @property
    def rank(self) -> TpRank:
        """The same two numbers, as formulas take them."""
        return TpRank(self.size, self.index)

    def enter(self, x: Tensor) -> Tensor:
        """What lies between GEMMs -> the input of a split GEMM: [S/tp, ...] -> [S, ...] with `sequence`."""
        return gather_rows(x, self.group) if self.sequence else copy_to(x, self.group)

    def leave(self, partial_x: Tensor) -> Tensor:
        """The partial sums of a split GEMM -> what lies between GEMMs (the pair of `enter`)."""
        return sum_rows(partial_x, self.group) if self.sequence else sum_over(partial_x, self.group)

    def own_rows(self, x: Tensor) -> Tensor:
        """The view of [S, ...] that lies between GEMMs here: all of it, or [S/tp, ...] with `sequence`."""
        return own_part(x, self.group) if self.sequence else x

    def all_columns(self, x: Tensor) -> Tensor:
        """[..., C/tp] -> [..., C]; no gradient goes through."""
        if self.size == 1:
            return x
        return torch.cat(all_gather(x.detach()[None], self.group).unbind(0), dim=-1)

    def place(self, dropout: DropoutState | None, S: int, shape: ModelShape) -> DropoutState | None:
        """The dropout of a microbatch of S tokens, told which rows and which heads are held here."""
        if dropout is None or self.size == 1:
            return dropout
        rows_S = self.own_rows(torch.arange(S, device=dropout.keys.device)) if self.sequence else None
        return replace(dropout, positions_S=rows_S, first_head=self.index * shape.num_heads // self.size)
