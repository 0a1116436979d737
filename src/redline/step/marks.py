"""Regions around the parts of a step, for the steps that are profiled and no others.

Nothing in the model or the step knows of them. For the time of a profiled step hooks are set on the modules,
and the few methods that mark a phase are shadowed on their object; afterwards both are gone, so that an
unprofiled step makes not one call more. A block under torch.compile is marked as a whole from outside:
its inside is one graph, and a hook there would have it compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import nn
from torch.profiler import record_function

from redline.ledger.marks import mark
from redline.model import Transformer
from redline.step.loop import Action
from redline.step.train_step import TrainStep

HOST_OF_ACTION = {"evaluate": "evaluation", "save": "checkpoint"}  # every other action is logging

COMPILED = "_compiled_call_impl"  # what nn.Module.compile() sets, and __call__ takes in place of forward


def region(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` inside a region."""

    @wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return inside


def marked_action(action: Action) -> Action:
    """The action inside a region of the host."""
    host = HOST_OF_ACTION.get(action.name, "logging")
    return replace(action, run=region(mark("host", host), action.run))


@contextmanager
def marked(step: TrainStep) -> Iterator[None]:
    """Within, the step, its optimizer and its model mark what they do."""
    model, optimizer = step.state.model, step.state.optimizer
    with ExitStack() as undo:
        shadow = _Shadows(undo)
        shadow(optimizer, "step", mark("phase", "optimizer"))
        shadow(optimizer.buffers, "zero_grad", mark("phase", "optimizer"))
        for way in ("bring", "take_back"):
            shadow(optimizer.adam.away, way, mark("module", "offload"))
        _mark_model(model, undo, shadow)
        yield


class _Shadows:
    """Puts a marked callable in place of an attribute of one object, until `undo` closes."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def __call__(self, owner: Any, name: str, *marks: str) -> None:
        own = vars(owner).get(name)
        call = getattr(owner, name)
        for each in reversed(marks):
            call = region(each, call)
        object.__setattr__(owner, name, call)
        self._undo.callback(_restore, owner, name, own)


def _restore(owner: Any, name: str, own: Any) -> None:
    if own is None:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, own)


def _mark_model(model: Transformer, undo: ExitStack, shadow: _Shadows) -> None:
    _hook(model, [mark("phase", "forward")], undo)
    shadow(model, "loss", mark("phase", "forward"), mark("module", "head"))
    for name, module in model.named_children():
        if module is not model.layers:
            _hook(module, [mark("module", name)], undo)
    for index, block in enumerate(model.layers):
        if getattr(block, COMPILED) is not None:
            shadow(block, COMPILED, mark("layer", index))
            continue
        _hook(block, [mark("layer", index)], undo)
        for name, module in block.named_modules():
            if name:
                _hook(module, [mark("module", name)], undo)
                _mark_sites(name, module, shadow)


def _mark_sites(name: str, module: nn.Module, shadow: _Shadows) -> None:
    """The callables of a module that are no modules: its GEMM sites, and the attention between them."""
    for attribute in sorted(vars(module)):
        if attribute.endswith("_site"):
            shadow(module, attribute, mark("module", f"{name}.{attribute}"))
        elif attribute == "attention":
            shadow(module, attribute, mark("module", "core_attention"))


def _hook(module: nn.Module, marks: list[str], undo: ExitStack) -> None:
    """Open regions before the module's forward and close them after it; a call may lie inside another."""
    opened: list[list[Any]] = []

    def before(_module: nn.Module, _inputs: Any) -> None:
        regions = [record_function(name) for name in marks]
        for each in regions:
            each.__enter__()
        opened.append(regions)

    def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        for each in reversed(opened.pop()):
            each.__exit__(None, None, None)

    undo.callback(module.register_forward_pre_hook(before).remove)
    undo.callback(module.register_forward_hook(after, always_call=True).remove)
