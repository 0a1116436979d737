"""Launching a Triton kernel again at the price of a dictionary look-up.

Triton's own dispatch works out at each launch which compiled form the arguments need, from their types, the
alignment of pointers and the divisibility of integers: about twice the host time of the launch itself. Here
a call is looked up by what those follow from (the dtype and alignment of each tensor, every other argument
as it is), and the compiled kernel found there is launched directly, past Triton's hooks where nobody has
hung any. What is not found goes through Triton, as does everything under its interpreter and on cards other
than NVIDIA's, where more decides on the form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

ALIGNMENT = 16  # bytes: what Triton compiles for, or not
BARE = frozenset((int, float, bool, str, type(None)))  # of these isinstance is slow to say: no Tensor
MOST_CALLS = 4096  # then all are forgotten: shapes that never come back must not fill the memory


def stream_of(device: int) -> int:
    """The handle of the device's current stream."""
    handle: int = driver.active.get_current_stream(device)
    return handle


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may have, nearly all of an SM's; for a CPU (-1) an H200's."""
    if device < 0:
        return 232_448
    limit: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return limit


def watched() -> bool:
    """Whether somebody, such as Triton's profiler, wants to hear of every launch."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class Launchable:
    """`kernel[grid](*args, **constants_and_options)` as for the kernel itself, which is `kernel`.

    The first argument is a tensor on the current device. Arguments given by name are constants or options.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self._found: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}
        self._constants = {param.name for param in kernel.params if param.is_constexpr}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        whole = (*grid, 1, 1)[:3]

        def launch(*args: Any, **named: Any) -> None:
            device = args[0].get_device()
            key = (
                device,
                len(args),
                *[
                    a if type(a) in BARE or not isinstance(a, Tensor) else (a.dtype, a.data_ptr() % ALIGNMENT)
                    for a in args
                ],
                *named,
                *named.values(),
            )
            found = self._found.get(key)
            if found is None:
                self._launch_anew(grid, key, args, named)
                return
            compiled, constants = found
            if watched():
                compiled[whole](*args, *constants)
                return
            form = compiled.function, compiled.packed_metadata
            compiled.run(*whole, stream_of(device), *form, None, None, None, *args, *constants)

        return launch

    def _launch_anew(
        self, grid: tuple[int, ...], key: tuple[Any, ...], args: Any, named: dict[str, Any]
    ) -> None:
        compiled = self.kernel[grid](*args, **named)
        names = self.kernel.arg_names
        constants = tuple(named[name] for name in names[len(args) :] if name in named)
        # The launch takes every argument by place. Constants are passed over there, so their order is free.
        complete = len(args) + len(constants) == len(names) and self._constants.issuperset(names[len(args) :])
        if complete and isinstance(compiled, CompiledKernel):
            if len(self._found) >= MOST_CALLS:
                self._found.clear()
            self._found[key] = compiled, constants


def launchable(kernel: Any) -> Any:
    """Decorator over @triton.jit of a kernel that is launched (not of a device function)."""
    return Launchable(kernel) if isinstance(kernel, JITFunction) and torch.version.hip is None else kernel
