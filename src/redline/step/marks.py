"""Regions around the parts of a step, for the steps that are profiled and no others.

Nothing in the model or the step knows of them (around.py): an unprofiled step makes not one call more. A
block under torch.compile is marked as a whole from outside: its inside is one graph, and a hook there would
have it compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.profiler import record_function

from redline.ledger.marks import mark
from redline.model import Transformer
from redline.step.around import Around, Context, inside
from redline.step.loop import Action
from redline.step.train_step import TrainStep

HOST_OF_ACTION = {"evaluate": "evaluation", "save": "checkpoint"}  # every other action is logging

COMPILED = "_compiled_call_impl"  # what nn.Module.compile() sets, and __call__ takes in place of forward


def region(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` inside a region."""
    return inside(_named(name), call)


def marked_action(action: Action) -> Action:
    """The action inside a region of the host."""
    host = HOST_OF_ACTION.get(action.name, "logging")
    return replace(action, run=region(mark("host", host), action.run))


@contextmanager
def marked(step: TrainStep) -> Iterator[None]:
    """Within, the step, its optimizer and its model mark what they do."""
    model, optimizer = step.state.model, step.state.optimizer
    with ExitStack() as undo:
        marks = _Marks(Around(undo))
        marks.call(optimizer, "step", mark("phase", "optimizer"))
        marks.call(optimizer.buffers, "zero_grad", mark("phase", "optimizer"))
        for way in ("bring", "take_back"):
            marks.call(optimizer.adam.away, way, mark("module", "offload"))
        _mark_model(model, marks)
        yield


class _Marks:
    """Sets regions."""

    def __init__(self, around: Around) -> None:
        self._around = around

    def call(self, owner: Any, name: str, *marks: str) -> None:
        """Around an attribute of one object, the first mark outermost."""
        for each in reversed(marks):
            self._around.call(owner, name, _named(each))

    def module(self, module: nn.Module, name: str) -> None:
        """Around its forward."""
        self._around.module(module, _named(name))


def _named(name: str) -> Context:
    return lambda *_, **__: record_function(name)


def _mark_model(model: Transformer, marks: _Marks) -> None:
    marks.module(model, mark("phase", "forward"))
    marks.call(model, "loss", mark("phase", "forward"), mark("module", "head"))
    for name, module in model.named_children():
        if module is not model.layers:
            marks.module(module, mark("module", name))
    for index, block in enumerate(model.layers):
        if getattr(block, COMPILED) is not None:
            marks.call(block, COMPILED, mark("layer", index))
            continue
        marks.module(block, mark("layer", index))
        for name, module in block.named_modules():
            if name:
                marks.module(module, mark("module", name))
                _mark_sites(name, module, marks)


def _mark_sites(name: str, module: nn.Module, marks: _Marks) -> None:
    """The callables of a module that are no modules: its GEMM sites, and the attention between them."""
    for attribute in sorted(vars(module)):
        if attribute.endswith("_site"):
            marks.call(module, attribute, mark("module", f"{name}.{attribute}"))
        elif attribute == "attention":
            marks.call(module, attribute, mark("module", "core_attention"))
