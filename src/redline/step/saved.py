"""What a step saves for backward, counted by the modules that formulas/saved.py predicts by.

For the forward passes of one step every part of the model runs inside hooks on what autograd saves: each
storage counts once, for the part that saved it last, and parameters do not count. Hooks that the model sets
itself (recompute, offload) lie between: what they drop is not counted, and what they move to host memory is,
for the part that saved it. The count holds no tensor, so it costs no memory; after the step nothing of it is
left on any object. The forwards that a backward runs again are not looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from redline.formulas.saved import EMBEDDING, FINAL_NORM, HEAD, MODULES, UNIT
from redline.model import Transformer
from redline.model.block import MLP, Block, SelfAttention
from redline.model.fp8 import Fp8Site
from redline.step.around import Around, Call, Context
from redline.step.train_step import TrainStep

Naming = Callable[[Tensor], str]
Hook = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A storage that was saved: by which module, and whether a copy in host memory is all that is kept."""

    storage: weakref.ref[Any]
    module: str
    num_bytes: int
    moved: bool


class SavedCount:
    """Bytes saved for backward by module, of the microbatch that keeps most.

    Args:
        known: tensors that are there anyway: parameters.

    Attributes:
        by_module: in the order of formulas.saved.MODULES; empty before the first forward pass has ended.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.by_module: dict[str, int] = {}
        self._open = False
        self._kept: dict[int, _Kept] = {}
        self._left: list[_Kept] = []  # in host memory, and their place on the device is another's
        self._inputs: dict[int, int] = {}

    def begins(self) -> None:
        """A forward pass begins."""
        self._open = True
        self._kept, self._left, self._inputs = {}, [], {}

    def holds(self, *inputs: Tensor) -> None:
        """Inputs of the pass, which are held whoever saves them; they count as the embedding's."""
        self._inputs |= {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in inputs}

    def ends(self) -> None:
        """The forward pass has ended: all that its backward needs is saved."""
        sums = dict.fromkeys(MODULES, 0)
        sums[EMBEDDING] = sum(self._inputs.values())
        for each in (*self._left, *self._kept.values()):
            if each.moved or each.storage() is not None:
                sums[each.module] += each.num_bytes
        if sum(sums.values()) > sum(self.by_module.values()):
            self.by_module = {name: size for name, size in sums.items() if size}
        self._open = False
        self._kept, self._left = {}, []

    def inside(self, naming: Naming) -> AbstractContextManager[object]:
        """Within, what is saved is kept by the module that `naming` says."""
        if not (self._open and torch.is_grad_enabled()):
            return nullcontext()
        region = _Region(self, naming, _hooks_of_the_model())
        return saved_tensors_hooks(region.pack, region.unpack)

    def saw(self, tensor: Tensor, kept: Any, naming: Naming) -> None:
        """`tensor` was saved, as `kept`: itself, nothing, or what stands for it in host memory."""
        storage = tensor.untyped_storage()
        place, moved = storage.data_ptr(), kept is not None and not isinstance(kept, Tensor)
        counted = self._open and kept is not None and storage.nbytes() > 0
        if not counted or place in self._known or place in self._inputs:
            return
        before = self._kept.get(place)
        if before is not None and before.moved and before.storage() is None:
            self._left.append(before)
        self._kept[place] = _Kept(weakref.ref(storage), naming(tensor), storage.nbytes(), moved)


@dataclass(frozen=True, slots=True)
class _Region:
    """The hooks of one part. PyTorch calls the innermost hooks alone, so that they pass on to the model's."""

    count: SavedCount
    naming: Naming
    around: tuple[Hook, Hook] | None

    def pack(self, tensor: Tensor) -> Any:
        """What is kept of a tensor."""
        kept = tensor if self.around is None else self.around[0](tensor)
        self.count.saw(tensor, kept, self.naming)
        return kept

    def unpack(self, kept: Any) -> Any:
        """The tensor again."""
        return kept if self.around is None else self.around[1](kept)


def _hooks_of_the_model() -> tuple[Hook, Hook] | None:
    """The innermost hooks here that are none of ours."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    region = None if hooks is None else getattr(hooks[0], "__self__", None)
    return region.around if isinstance(region, _Region) else hooks


def count_next_step(step: TrainStep) -> SavedCount:
    """Have the next step count what its forward passes save; those after it make not one call more.

    No block may run under torch.compile: hooks would change its graph.
    """
    count, undo = SavedCount(step.state.model.parameters()), ExitStack()

    def once(call: Call) -> Call:
        def first(*args: Any) -> Any:
            undo.close()
            with ExitStack() as counting:
                _Parts(count, Around(counting)).of_step(step)
                return call(*args)

        return first

    Around(undo).replace(step, "_accumulate", once)
    return count


class _Parts:
    """Sets the hooks of every part of a model."""

    def __init__(self, count: SavedCount, around: Around) -> None:
        self._count, self._around = count, around

    def of_step(self, step: TrainStep) -> None:
        """From the beginning to the end of each forward pass."""

        def then_ends(call: Call) -> Call:
            def ended() -> Any:
                self._count.ends()
                return call()

            return ended

        self._of_model(step.state.model)
        self._around.replace(step, "_after_forward", then_ends)

    def _of_model(self, model: Transformer) -> None:
        def forward(tokens_BS: Tensor, positions_BS: Tensor, *_: Any) -> AbstractContextManager[object]:
            self._count.begins()
            self._count.holds(tokens_BS, positions_BS)
            return self._count.inside(lambda _: UNIT)

        def loss(
            _: Tensor, labels_BS: Tensor, weights_BS: Tensor, **__: Any
        ) -> AbstractContextManager[object]:
            self._count.holds(labels_BS, weights_BS)
            return self._count.inside(lambda _: HEAD)

        self._around.module(model, forward)
        self._around.replace(model, "_offload", self._with_units)
        self._around.module(model.embedding, self._named(EMBEDDING))
        self._around.module(model.final_norm, self._named(FINAL_NORM))
        self._around.call(model, "loss", loss)
        for block in model.layers:
            assert isinstance(block, Block)
            self._of_block(block)

    def _with_units(self, offload: Call) -> Call:
        """What moves a layer's tensors lies inside the model's region, and a unit has none of its own."""

        def made(*args: Any) -> Any:
            found = offload(*args)
            move = found.layer

            @contextmanager
            def layer(index: int) -> Iterator[None]:
                with move(index), self._count.inside(lambda _: UNIT):
                    yield

            found.layer = layer  # of an object that lives for one forward
            return found

        return made

    def _of_block(self, block: Block) -> None:
        attention, mlp = block.attention, block.mlp

        def layer(_: Tensor, rope: Any, *__: Any) -> AbstractContextManager[object]:
            if rope is not None:
                self._count.holds(rope.cos_SP, rope.sin_SP)
            return self._count.inside(lambda _: "mlp")

        self._around.module(block, layer)
        self._around.module(attention, self._named("attention.core", mask="attention.dropout"))
        self._around.module(mlp, self._named("mlp", mask="mlp.dropout"))
        self._around.call(attention, "attention", self._named("attention.core"))
        for name, part in (("attention", attention), ("mlp", mlp)):
            self._around.module(part.norm, self._named(f"{name}.norm"))
            if part.norm.hands_on:
                self._around.call(part.norm, "split", self._named(f"{name}.norm"))
        self._of_site(attention, "qkv", "attention.norm", "attention.qkv")
        self._of_site(attention, "proj", "attention.proj", "attention.proj")
        self._of_site(mlp, "fc1", "mlp.norm", "mlp.fc1")
        self._of_site(mlp, "fc2", "mlp.activation", "mlp.fc2")
        if mlp.whole is not None:
            sizes = mlp.shape.hidden, mlp.shape.fc1_size
            self._around.call(mlp, "whole", lambda *_: self._count.inside(_in_one_function(*sizes)))

    def _of_site(self, part: SelfAttention | MLP, linear: str, before: str, gemm: str) -> None:
        """A GEMM and what runs before it, which may be one Function that keeps the operand in fp8."""
        name, site = f"{linear}_site", getattr(part, f"{linear}_site")
        if isinstance(site, Fp8Site):
            self._around.call(site, "multiply", self._named(gemm))
            if site.prologue is not None:
                self._around.call(site, "prologue", self._named(before))
        self._around.call(
            part, name, lambda *_: self._count.inside(lambda kept: gemm if _is_fp8(kept) else before)
        )
        self._around.module(getattr(part, linear), self._named(gemm))

    def _named(self, name: str, mask: str | None = None) -> Context:
        """The part itself, whose masks of booleans may be another's."""
        masks = name if mask is None else mask
        return lambda *_, **__: self._count.inside(lambda kept: masks if kept.dtype == torch.bool else name)


def _in_one_function(hidden: int, fc1_size: int) -> Naming:
    """Who keeps a tensor of an MLP in fp8 that is one Function."""

    def naming(kept: Tensor) -> str:
        width = kept.shape[-1] if kept.dim() > 1 else 0
        if _is_fp8(kept):
            return "mlp.fc1" if width == hidden else "mlp.fc2"
        return "mlp.activation" if width == fc1_size else "mlp.norm"

    return naming


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1
