"""Triton 3.6's interpreter without the work it repeats: the same arrays, in a third of the time.

Nearly all of an interpreted kernel's time is spent around its arithmetic. What is left out here changes no
result: what is looked up anew at every call is kept, and what is computed and then thrown away is not.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any


def quicken(interpreter: Any) -> None:
    """Once a process, before the first launch."""
    from triton.language import core

    # Each sum and product of integers is computed again in 64 bits and compared with the limits of its type,
    # ten operations; then device_assert looks for the option `debug`, which is off, and ignores the answer.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once_a_launch(interpreter, core)
    _keep_dtypes(interpreter, core)
    _keep_block_types(core)
    _type_tuples_when_asked(core)


def _patch_the_language_once_a_launch(interpreter: Any, core: Any) -> None:
    """It searches the whole language for what to patch at every call of a function, tl.sum as well."""
    import triton.language as tl

    running = False

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            nonlocal running
            super().restore()
            running = False

    @functools.cache
    def builtins_of(place: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(place) if core.is_builtin(member)]

    def patch_language(fn: Any) -> Any:
        nonlocal running
        if running:  # a function that the kernel calls
            return None
        running, scope = True, Launch()
        for place in (tl, core, tl.math, core.tensor, core.tensor_descriptor_base):
            for name, member in builtins_of(place):
                interpreter._patch_attr(place, name, member, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_tensor(core.tensor, scope)
        for language in (tl, core):
            interpreter._patch_lang_core(language, scope)
        return scope

    interpreter._patch_lang = patch_language


def _keep_dtypes(interpreter: Any, core: Any) -> None:
    """The table from Triton's dtypes to numpy's is built at every look-up."""
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(kind: Any) -> Any:
        name = (kind.element_ty if isinstance(kind, core.block_type) else kind).name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def _keep_block_types(core: Any) -> None:
    """A tensor's type checks its shape and spells its name, and the tensor wraps each number of its shape."""
    make, known = core.block_type.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (element_ty.name, *(int(getattr(size, "value", size)) for size in shape))
        if sizes not in known:
            make(self, element_ty, shape)
            known[sizes] = self.__dict__
        self.__dict__ = known[sizes]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        facts = type.__dict__.get("facts_of_a_tensor")
        if facts is None:
            shape = type.shape if type.is_block() else ()
            numel = type.numel if type.is_block() else 1
            facts = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel), type.scalar
            type.facts_of_a_tensor = facts
        self.shape, self.numel, self.dtype = facts

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


def _type_tuples_when_asked(core: Any) -> None:
    """The type of a tuple, with its name, is made for every comparison of two shapes."""
    make = core.tuple.__init__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = init
    core.tuple.type = property(type_of, lambda self, type: self.__dict__.__setitem__("_type", type))
