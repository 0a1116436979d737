"""Counts the bytes of live tensors, as a caching allocator's "allocated" does, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """`now` and `peak` bytes of the storages made by operators that ran under this mode and are still alive.

    `known` storages (parameters, gradients, inputs) are never counted. Scratch inside a kernel is not seen.
    """

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self._live = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage):
        if storage._cdata in self._live or not storage.nbytes():
            return
        self._live.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, num_bytes):
        self._live.discard(key)
        self.now -= num_bytes
