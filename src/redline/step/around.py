"""Contexts around calls of a model's parts, set from outside and taken away again.

Neither the model nor the step knows of them: modules get hooks, and a callable that is no module is shadowed
on the object that holds it. Once they are taken away every object is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

from torch import nn

Call = Callable[..., Any]
Context = Callable[..., AbstractContextManager[object]]  # made of a call's arguments


def inside(context: Context, call: Call) -> Call:
    """`call` within the context that its arguments make."""

    @wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return call(*args, **kwargs)

    return within


class Around:
    """Sets contexts, until `undo` closes."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def replace(self, owner: Any, name: str, change: Callable[[Call], Call]) -> None:
        """Put another callable in place of an attribute of this one object."""
        own = vars(owner).get(name)
        object.__setattr__(owner, name, change(getattr(owner, name)))
        self._undo.callback(_restore, owner, name, own)

    def call(self, owner: Any, name: str, context: Context) -> None:
        """Around an attribute of this one object."""
        self.replace(owner, name, lambda call: inside(context, call))

    def module(self, module: nn.Module, context: Context) -> None:
        """Around its forward; a call may lie inside another."""
        opened: list[AbstractContextManager[object]] = []

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            entered = context(*inputs)
            entered.__enter__()
            opened.append(entered)

        def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            opened.pop().__exit__(None, None, None)

        self._undo.callback(module.register_forward_pre_hook(before).remove)
        self._undo.callback(module.register_forward_hook(after, always_call=True).remove)


def _restore(owner: Any, name: str, own: Any) -> None:
    if own is None:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, own)
