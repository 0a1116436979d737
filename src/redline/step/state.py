"""Everything that changes during a run, in one place: exactly what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redline.comm.chunked import Chunked
from redline.errors import CheckpointError
from redline.formulas.shape import ModelShape
from redline.model import EngineFp8, Fp8Gemms, Transformer, logical_tensors, parts_of
from redline.optim import Kind, Optimizer, Pieces

# Where each kind of flat buffer stands in a checkpoint: param/embedding.word.weight, exp_avg/...
SAVED_KINDS: dict[str, Kind] = {"param": "main_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
COUNTERS = ("iteration", "consumed_samples", "consumed_tokens", "schedule_samples", "nonfinite_steps")


@dataclass(slots=True)
class TrainState:
    """The mutable state of a run.

    The parameters saved are the main ones: in a half format `param` is their rounded copy, made anew on load.

    Attributes:
        iteration: optimizer steps taken, skipped ones included.
        consumed_samples: sequences drawn from the training data: the data cursor.
        consumed_tokens: tokens of those that counted in the loss.
        schedule_samples: sequences of the steps that were applied: the place in the learning-rate schedule.
        nonfinite_steps: steps with a NaN or Inf that a loss scale does not explain.
        fp8: scales and histories of the GEMMs in fp8; None without.
        returned: GEMMs that saturated too often, and the step after which each ran in bf16; kept through
            parts of the run without fp8, forgotten where NVIDIA's modules take all of a layer into fp8.
    """

    model: Transformer
    optimizer: Optimizer
    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    schedule_samples: int = 0
    nonfinite_steps: int = 0
    fp8: Fp8Gemms | EngineFp8 | None = None
    returned: dict[str, int] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.model.shape

    def tensors(self, *, moments: bool = True, fp8: bool = True) -> dict[str, Tensor]:
        """Views of every saved tensor by logical name, in the plain layout; filling them restores the state.

        A tensor of which other ranks hold the rest is `Chunked`: whole in name, with this rank's pieces.
        A main parameter that is stored in two halves, or a moment in 8 bits, is a copy of the numbers in host
        memory instead; `take` stores what it was filled with.

        Args:
            moments: include the optimizer's moments.
            fp8: include scales and histories, where there are any.
        """
        found: dict[str, Tensor] = {}
        for prefix, kind in SAVED_KINDS.items():
            if prefix != "param" and not moments:
                continue
            for name, view in self.optimizer.buffers.views(kind).items():
                found |= {f"{prefix}/{logical}": part for logical, part in self._saved(name, view)}
            for name, pieces in self.optimizer.buffers.pieces(kind).items():
                found |= {f"{prefix}/{logical}": part for logical, part in self._saved_pieces(name, pieces)}
        return found | (self.fp8.state.tensors() if self.fp8 and fp8 else {})

    def _saved(self, name: str, view: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The logical tensors inside one parameter, or the pieces of them that are here."""
        rank = self.model.tp.rank
        views = logical_tensors(name, view, self.shape, rank)
        for part in parts_of(name, self.shape, rank):
            whole, piece = part.tensor, views[part.tensor.name]
            split = part.held.size != whole.size
            yield whole.name, Chunked.make(whole.size, {part.held.offset: piece}) if split else piece

    def _saved_pieces(self, name: str, pieces: Pieces) -> Iterator[tuple[str, Tensor]]:
        """The same of a parameter that data-parallel ranks share: its pieces, as rectangles of the whole."""
        rank = self.model.tp.rank
        places = logical_tensors(name, _nowhere(pieces), self.shape, rank)
        for part in parts_of(name, self.shape, rank):
            place, first = places[part.tensor.name], part.held.offset
            own = pieces.cut(int(place.storage_offset()), place.shape)
            held = {
                tuple(a + b for a, b in zip(first, offset, strict=True)): piece
                for offset, piece in own.rectangles()
            }
            yield part.tensor.name, Chunked.make(part.tensor.size, held, pieces.dtype)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors()` was filled with: store what was a copy, round the parameters.

        What other ranks were filled with comes from there.
        """
        buffers = self.optimizer.buffers
        for name, main in buffers.write_main_params():
            self._fill(name, main, "param", tensors)
        for kind, name, moment in buffers.write_moments() if self._has_moments(tensors) else ():
            self._fill(name, moment, kind, tensors)
        self.optimizer.publish_params()

    @staticmethod
    def _has_moments(tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith("exp_avg/") for name in tensors)

    def _fill(self, name: str, whole: Tensor, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Bring what this rank was filled with into `whole`, the parameter `name` or a moment of it."""
        for logical, place in self._saved(name, whole):
            ((first, piece),) = _boxes(place).items()
            for offset, found in _boxes(tensors[f"{prefix}/{logical}"]).items():
                box = zip(offset, first, found.shape, strict=True)
                target = piece[tuple(slice(o - f, o - f + size) for o, f, size in box)]
                if target.data_ptr() != found.data_ptr():
                    target.copy_(found)

    def values(self) -> dict[str, Any]:
        """Every counter, as JSON values."""
        values = {name: getattr(self, name) for name in COUNTERS} | {
            "optimizer": self.optimizer.state_values()
        }
        fp8 = self.fp8.state.values() if self.fp8 else {}
        fp8 |= {"bf16": self.returned} if self.returned else {}
        return values | ({"fp8": fp8} if fp8 else {})

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over `values()` of an earlier run; to be called once the tensors are filled.

        Raises: CheckpointError when a counter is missing, or a GEMM cannot stay in bf16 (see Fp8Gemms).
        """
        missing = [name for name in (*COUNTERS, "optimizer") if name not in values]
        if missing:
            raise CheckpointError(
                f"the checkpoint's values lack {', '.join(missing)}.",
                why="training cannot go on from a state it does not know.",
                mend="load another checkpoint, or start from its weights alone with --finetune.",
            )
        for name in COUNTERS:
            setattr(self, name, int(values[name]))
        self.optimizer.load_state_values(values["optimizer"])
        if self.fp8 and self.fp8.state.fits(values.get("fp8")):
            self.fp8.state.load_values(values["fp8"])
        self.returned = {} if isinstance(self.fp8, EngineFp8) else returned_in(values)
        if isinstance(self.fp8, Fp8Gemms):
            self.fp8.keep_in_bf16(self.returned)


def returned_in(values: Mapping[str, Any]) -> dict[str, int]:
    """`returned` of `TrainState.values()`, of earlier ones too, which named no steps: by then, at least."""
    found = values.get("fp8", {}).get("bf16", {})
    return dict(found) if isinstance(found, Mapping) else dict.fromkeys(found, int(values["iteration"]))


def _boxes(tensor: Tensor) -> dict[torch.Size, Tensor]:
    """What is here of a tensor, by offset."""
    return tensor.pieces if isinstance(tensor, Chunked) else {torch.Size([0] * tensor.dim()): tensor}


def _nowhere(pieces: Pieces) -> Tensor:
    """A tensor of the whole size without memory: where logical tensors lie in it is all that is asked."""
    return torch.empty(pieces.shape, device="meta")
