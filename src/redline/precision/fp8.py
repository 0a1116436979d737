"""The scaling state of fp8 training: a scale, a largest value and a history for each operand of each site.

A GEMM site has three operands: its input x, its weight w and the gradient dy of its output. All sites share
one tensor of each kind, so that a step ends with a few small kernels and, on several ranks, one collective.

    delayed     scale = max / amax / 2^margin, amax from the last `history` steps ("max" or "most_recent");
                operands are cast in one pass, by a scale that is known beforehand
    tensorwise  scale = max / amax of the tensor itself: one more read
    blockwise, mxfp8    a scale for each block, found as it is cast: nothing is remembered here

Scales are renewed between steps, never within: every microbatch of a step, and a recomputed forward, casts
alike (Transformer Engine renews after each microbatch). Delayed scaling too measures before it casts in the
first step of a run, when nothing is known (there Transformer Engine casts by 1 and loses the gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm import Group
from redline.comm.collectives import all_reduce
from redline.kernels import fp8
from redline.kernels.fp8 import FP8_CUT, FP8_MAX
from redline.precision.fp8_stats import Fp8Row, rows_of

Format = Literal["hybrid", "e4m3"]
ScalingRecipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Result = TypeVar("Result", bound=tuple[Tensor, ...])
Operand = Literal["x", "w", "dy"]
OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")
INPUTS = [OPERANDS.index("x"), OPERANDS.index("dy")]
FITTING = ("sites", "history_len", "format", "margin", "blocks")  # where they differ, scales do not fit
NEVER = 1 << 30  # more steps in a row than a run has
LOOKED_AT = 1 << 24  # values at a time: as fp32, all those of a large head would be gigabytes
ENLARGED = 2.0**20  # what is 0 in fp8 even so was 0 before, or too small to matter


class Purpose(Enum):
    """What a cast is for: its largest value, the operand itself, or a look at what the cast loses."""

    MEASURE = 0
    CAST = 1
    LOOK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Spec:
    """How operands are cast.

    Attributes:
        format: "hybrid" (gradients in E5M2, the rest in E4M3) or "e4m3" throughout.
        recipe: where a scale comes from.
        margin: scales are divided by 2^margin.
        interval: steps between renewals of the scales.
        history_len: steps that a history remembers.
        algo: which of its values counts: "max" or "most_recent".
        wgrad: whether weight gradients are computed in fp8 too.
        emulate: GEMMs of blocks run in fp32 on the values that the operands stand for, on a GPU too.
        patience: steps in a row in which an operand may saturate before its site returns to bf16.
    """

    format: Format = "hybrid"
    recipe: ScalingRecipe = "delayed"
    margin: int = 0
    interval: int = 1
    history_len: int = 1024
    algo: Literal["max", "most_recent"] = "max"
    wgrad: bool = True
    emulate: bool = False
    patience: int = NEVER

    @property
    def blocks(self) -> bool:
        """Whether each block of a tensor has its own scale."""
        return self.recipe in ("blockwise", "mxfp8")

    def dtype(self, operand: Operand) -> torch.dtype:
        """The format of an operand."""
        return torch.float8_e5m2 if operand == "dy" and self.format == "hybrid" else torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Scaling:
    """What one operand of one site is cast with: one-element views of the state's tensors, and its format.

    `counts` [3] holds the values of a step that is looked at, those cut off, and those rounded to 0.
    """

    scale: Tensor
    inverse: Tensor
    amax: Tensor
    counts: Tensor
    dtype: torch.dtype


class Fp8State:
    """Scales, largest values and histories of all sites.

    Args:
        sites: names, in the order of the model.
        spec: how operands are cast.
        device: of the tensors.
        kernels: casts run as Triton kernels.
        ranks: those that share their largest values, so that all cast alike; None on one process.

    Attributes:
        looks: this step counts what its casts lose, for `table`; each cast runs four times then.
        overshoot: fp32 [sites, 3], the largest amax * scale / limit since `forget_overshoot`: above 1, values
            were cut off. Of delayed scaling; where tensors are measured nothing is cut off.
    """

    def __init__(
        self,
        sites: Sequence[str],
        spec: Fp8Spec,
        device: torch.device | str,
        ranks: Group | None = None,
        kernels: bool = False,
    ) -> None:
        self.sites, self.spec = tuple(sites), spec
        size = (len(self.sites), len(OPERANDS))
        self.scale = torch.ones(size, device=device)
        # cuBLAS reads a scale at addresses that are multiples of 16 bytes only.
        self.inverse = torch.ones((*size, 4), device=device)[..., :1].squeeze(-1)
        self.amax = torch.zeros(size, device=device)
        self.history = torch.zeros((*size, spec.history_len), device=device)
        self._limits, self._cuts = (
            torch.tensor([table[spec.dtype(operand)] for operand in OPERANDS], device=device)
            for table in (FP8_MAX, FP8_CUT)
        )
        self.overshoot = torch.zeros(size, device=device)
        self.streak = torch.zeros(size, dtype=torch.int32, device=device)  # steps in a row that saturated
        self._counts = torch.zeros((*size, 3), device=device, dtype=torch.int64)
        self._table: Tensor | None = None
        self._kept = self.scale[:, INPUTS]  # of training, while an evaluation goes on
        self.ranks = ranks
        self.kernels = kernels
        self.looks = False
        self.steps = 0

    @property
    def measures(self) -> bool:
        """Whether operands are measured before they are cast: nothing is known of them yet, or by recipe."""
        return self.spec.recipe != "delayed" or self.steps == 0

    def scaling(self, site: str, operand: Operand) -> Scaling:
        """Views of the one operand; `amax` is raised by casts, the others renewed by `step`."""
        at = self.sites.index(site), OPERANDS.index(operand)
        scale, inverse, amax = (
            tensor[at[0], at[1] : at[1] + 1] for tensor in (self.scale, self.inverse, self.amax)
        )
        return Scaling(scale, inverse, amax, self._counts[at], self.spec.dtype(operand))

    def casting(
        self,
        scaling: Scaling,
        run: Callable[[Tensor, Tensor, Purpose], Result],
        *,
        measured: bool = False,
        among: Group | None = None,
    ) -> tuple[Result, Tensor]:
        """What `run(scale, amax, Purpose.CAST)` gives, and the inverse scale that belongs to it.

        `run` casts by `scale` and raises `amax`; the first of its results is the operand, by rows. Where
        tensors are measured first, and this one has not been, it runs for its largest value before, and only
        that counts: the largest of all ranks of `among`, which hold parts of one operand.
        """
        inverse = scaling.inverse
        if self.measures and not measured:
            amax = torch.zeros_like(scaling.amax)
            run(scaling.scale, amax, Purpose.MEASURE)
            if among is not None:
                all_reduce(amax, among, "max")
            limit = FP8_MAX[scaling.dtype] * 2.0**-self.spec.margin
            scaling.scale.copy_(scale_of(amax, limit, scaling.scale))
            inverse = scaling.scale.reciprocal()  # its own: the next cast has another
            scaling.inverse.copy_(inverse)
        if self.looks:
            self._look(scaling, run)
        return run(scaling.scale, scaling.amax, Purpose.CAST), inverse

    def measure_weights(self, amax: Tensor) -> None:
        """Scales of all weights by their largest values [sites], before they are cast in parts."""
        place = OPERANDS.index("w")
        limit = self._limits[place] * 2.0**-self.spec.margin
        self.scale[:, place] = scale_of(amax, limit, self.scale[:, place])
        self.inverse[:, place] = self.scale[:, place].reciprocal()

    def _look(self, scaling: Scaling, run: Callable[[Tensor, Tensor, Purpose], Result]) -> None:
        """Count what the cast is about to lose, from casts by other scales: no kernel counts by itself."""

        def cast(factor: float) -> Sequence[Tensor]:
            q = run(scaling.scale * factor, torch.zeros_like(scaling.amax), Purpose.LOOK)[0]
            return torch.split(q.flatten(), LOOKED_AT)

        # Half as large, what was cut off has room.
        for small, large, plain in zip(cast(0.5), cast(ENLARGED), cast(1.0), strict=True):
            cut = (small.float().abs() > FP8_MAX[scaling.dtype] / 2).sum()
            lost = ((plain.float() == 0) & (large.float() != 0)).sum()
            scaling.counts[0] += small.numel()
            scaling.counts[1:] += torch.stack((cut, lost))

    def cast(
        self,
        x_TC: Tensor,
        scaling: Scaling,
        *,
        rows: bool = True,
        columns: bool = False,
        among: Group | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, C], q^T [C, T'], inverse scale [1]); a layout that is not wanted is empty.

        among: the ranks that hold other rows of the operand, see `casting`.
        """

        def run(scale: Tensor, amax: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor]:
            wanted = (rows, columns) if purpose is Purpose.CAST else (purpose is Purpose.LOOK, False)
            q: tuple[Tensor, Tensor] = fp8.cast(x_TC, scale, amax, scaling.dtype, *wanted, self.kernels)
            return q

        (q, qt), inverse = self.casting(scaling, run, among=among)
        return q, qt, inverse

    def note_blocks(self, site: str, operand: Operand, x: Tensor, q: Tensor) -> None:
        """In a step that is looked at: count what a cast by blocks lost; none of its values is cut off."""
        if not self.looks:
            return
        scaling = self.scaling(site, operand)
        torch.maximum(scaling.amax, x.detach().abs().amax().float(), out=scaling.amax)
        lost = ((q[: len(x)].float() == 0) & (x != 0)).sum()
        scaling.counts.add_(torch.stack((lost.new_tensor(x.numel()), torch.zeros_like(lost), lost)))

    def step(self) -> None:
        """End of an optimizer step: remember its largest values; renew the scales when it is time."""
        if self.ranks is not None and self.ranks.handle is not None:
            self.ranks.sends("all-reduce", self.amax)
            dist.all_reduce(self.amax, dist.ReduceOp.MAX, group=self.ranks.handle)
        if self.looks:
            self._note_table()
        if not self.measures:
            torch.maximum(self.overshoot, self.amax * self.scale / self._limits, out=self.overshoot)
            self.streak.add_(1).mul_(self.saturated())
        seen = self.amax.where(self.amax.isfinite(), 0.0)  # an overflow says nothing about a scale
        self.history[:, :, self.steps % self.spec.history_len] = seen
        self.steps += 1
        delayed = self.spec.recipe == "delayed"
        # What ranks measured by themselves they agree on here, after the first step too.
        if not delayed or self.steps == 1 or self.steps % self.spec.interval == 0:
            amax = self.history.amax(-1) if delayed and self.spec.algo == "max" else seen
            limits = self._limits * 2.0**-self.spec.margin
            self.scale.copy_(scale_of(amax, limits, self.scale))
            self.inverse.copy_(self.scale.reciprocal())
        self.amax.zero_()

    def keep_inputs(self) -> None:
        """Before an evaluation, which may measure its inputs and scale them by that."""
        self._kept = self.scale[:, INPUTS].clone()

    def forget_inputs(self) -> None:
        """After an evaluation: what its casts saw of inputs says nothing about training's."""
        self.amax[:, INPUTS] = 0.0
        self.scale[:, INPUTS] = self._kept
        self.inverse[:, INPUTS] = self._kept.reciprocal()

    def saturated(self) -> Tensor:
        """bool [sites, 3]: whether a value of this step so far was cut off, by more than its rounding."""
        return self.amax * self.scale > self._cuts

    def impatient(self) -> list[tuple[str, Operand]]:
        """Operands that saturated in more steps in a row than patience lasts. Reads the device."""
        found = (self.streak >= self.spec.patience).nonzero().tolist()
        return [(self.sites[index], OPERANDS[place]) for index, place in found]

    def worst_overshoot(self) -> tuple[float, str, Operand]:
        """The largest `overshoot`, its site and its operand, forgotten thereby. Reads the device once."""
        value, at = self.overshoot.flatten().max(0)
        factor, place = torch.stack((value.double(), at.double())).tolist()
        self.overshoot.zero_()
        index, operand = divmod(int(place), len(OPERANDS))
        return factor, self.sites[index], OPERANDS[operand]

    def _note_table(self) -> None:
        if self.ranks is not None and self.ranks.handle is not None:
            self.ranks.sends("all-reduce", self._counts)
            dist.all_reduce(self._counts, group=self.ranks.handle)
        scale = torch.full_like(self.scale, torch.nan) if self.spec.blocks else self.scale  # many, or one
        facts = torch.stack((self.amax, scale), -1).double()
        self._table = torch.cat((facts, self._counts.double()), -1)
        self._counts.zero_()
        self.looks = False

    def table(self) -> list[Fp8Row]:
        """Of the newest step that was looked at: a row for each operand that was cast. Reads the device."""
        if self._table is None:
            return []
        names = [(site, operand) for site in self.sites for operand in OPERANDS]
        return rows_of(names, self._table.flatten(0, 1).tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Views of what a checkpoint holds, by name; their size does not depend on the steps taken."""
        found = {}
        for index, site in enumerate(self.sites):
            for place, operand in enumerate(OPERANDS):
                found[f"fp8.history/{site}.{operand}"] = self.history[index, place]
                found[f"fp8.scale/{site}.{operand}"] = self.scale[index, place : place + 1]
        return found

    def values(self) -> dict[str, Any]:
        """The state beside tensors, as JSON values."""
        values = {"steps": self.steps, "history_len": self.spec.history_len, "sites": list(self.sites)}
        values |= {"format": self.spec.format, "margin": self.spec.margin, "blocks": self.spec.blocks}
        finite = self.overshoot.nan_to_num(torch.finfo(torch.float32).max)  # JSON has no Inf and no NaN
        return values | {"streak": self.streak.tolist(), "overshoot": finite.tolist()}

    def fits(self, values: Mapping[str, Any] | None) -> bool:
        """Whether `values` and the tensors beside them belong to the same sites and the same casts.

        A scale of E5M2 makes values 128 times too large for E4M3, and in reverse as much too small.
        """
        wanted = self.values()
        return values is not None and all(values.get(key) == wanted[key] for key in FITTING)

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over `values()`; to be called once the tensors are filled."""
        self.steps = int(values["steps"])
        self.inverse.copy_(self.scale.reciprocal())
        self.streak.copy_(torch.tensor(values.get("streak", 0), dtype=torch.int32))
        self.overshoot.copy_(torch.tensor(values.get("overshoot", 0.0)))
        self.amax.zero_()


def scale_of(amax: Tensor, limit: Tensor | float, before: Tensor) -> Tensor:
    """limit / amax; as before where nothing but zeros was seen, or nothing finite; never infinite."""
    largest = torch.finfo(torch.float32).max
    if not isinstance(limit, Tensor):  # a number divided by a tensor is rounded twice: by its reciprocal
        limit = amax.new_full((), limit)
    scale = (limit / amax).clamp(max=largest)
    return scale.where((amax > 0) & amax.isfinite(), before)
