"""Collectives on flat tensors, each in place, over one group.

PyTorch's spellings change from release to release and are wrapped once, here. A group of one rank sends
nothing, so nobody has to ask for its size. Whoever wants to count, slow down or simulate what is sent hands
the same methods to the caller by another object.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm.groups import Group
from redline.comm.pace import Pace

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


DistError: type[Exception] = dist.DistError
_WORDS = ("gloo", "nccl", "connection", "peer", "socket", "timed out")


def is_transport(error: RuntimeError) -> bool:
    """Whether an error is of sending: Gloo raises plain RuntimeErrors when another rank is gone."""
    return any(word in str(error).lower() for word in _WORDS)


class Work(Protocol):
    """Something sent; on a GPU `wait` makes the current stream wait, on a CPU the caller."""

    def wait(self) -> Any:
        """Until then the tensor belongs to the collective."""


@runtime_checkable
class Sent(Work, Protocol):
    """A collective under way that another one may follow."""

    def is_completed(self) -> bool:
        """Whether it is over; on a GPU that asks the device."""


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """At once."""

    def is_completed(self) -> bool:
        """It is."""
        return True


class Transport(Protocol):
    """What data parallelism asks of a group."""

    size: int
    index: int

    def all_reduce(self, tensor: Tensor) -> Sent:
        """Start summing `tensor` over the ranks, in place."""

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Start summing the own part of `tensor`, in place; what the other parts hold then is undefined."""

    def all_gather(self, tensor: Tensor) -> Work:
        """Start filling the other parts of `tensor` from the ranks that own them."""

    def can_follow(self, first: Sent) -> bool:
        """Whether `all_reduce_after` would start at once, without waiting for `first` on the host."""

    def all_reduce_after(self, first: Sent, tensor: Tensor) -> Sent:
        """Start summing `tensor` over the ranks once `first`, along another axis, has ended."""


class Collectives:
    """A Transport over torch.distributed.

    Args:
        group: the ranks.
        wide_sum: reduce-scatter sends half-precision parts as they are and sums them in fp32 at their owner
            (`--ddp-reduce-scatter-with-fp32-accumulation`).
    """

    def __init__(self, group: Group, *, wide_sum: bool = False) -> None:
        self.size, self.index = group.size, group.index
        self._group, self._handle, self._wide_sum = group, group.handle, wide_sum
        self._beside: torch.cuda.Stream | None = None

    def all_reduce(self, tensor: Tensor) -> Sent:
        """See Transport."""
        if self._handle is None:
            return Done()
        self._group.sends("all-reduce", tensor)
        work: Sent = dist.all_reduce(tensor, group=self._handle, async_op=True)
        return work

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """See Transport."""
        if self._handle is None:
            return Done()
        self._group.sends("reduce-scatter", tensor)
        if self._wide_sum and tensor.element_size() < 4:
            return _WideSum(tensor, self._own(tensor), self.size, self._handle)
        work: Work = _reduce_scatter(self._own(tensor), tensor, group=self._handle, async_op=True)
        return work

    def all_gather(self, tensor: Tensor) -> Work:
        """See Transport."""
        if self._handle is None:
            return Done()
        self._group.sends("all-gather", tensor)
        work: Work = _all_gather(tensor, self._own(tensor), group=self._handle, async_op=True)
        return work if self._group.pace is None else _Timed(work, self._group.pace)

    def can_follow(self, first: Sent) -> bool:
        """See Transport. On GPUs always, so all ranks start the same in the same order, as NCCL wants it."""
        return self._on_gpus or first.is_completed()

    def all_reduce_after(self, first: Sent, tensor: Tensor) -> Sent:
        """See Transport. On a GPU a stream beside the current one waits for `first`, on a CPU the caller."""
        if not self._on_gpus:
            first.wait()
            return self.all_reduce(tensor)
        self._beside = self._beside or torch.cuda.Stream(tensor.device)
        self._beside.wait_stream(torch.cuda.current_stream(tensor.device))  # of the sum of one rank alone
        with torch.cuda.stream(self._beside):
            first.wait()
            return self.all_reduce(tensor)

    @property
    def _on_gpus(self) -> bool:
        return self._handle is not None and dist.get_backend(self._handle) == "nccl"

    def _own(self, tensor: Tensor) -> Tensor:
        length = tensor.numel() // self.size
        return tensor[self.index * length : (self.index + 1) * length]


class _Timed:
    """Work whose wait, in the midst of a rank's own, is no part of that."""

    def __init__(self, work: Work, pace: Pace) -> None:
        self._work, self._pace = work, pace

    def wait(self) -> None:
        """Wait for it."""
        with self._pace.waiting():
            self._work.wait()


class _WideSum:
    """A reduce-scatter as an all-to-all whose parts are added in fp32 when it is waited for.

    It is no `Sent`, which another collective may follow: on a GPU the parts belong to the stream that began
    it, and would be given back while the stream that `all_reduce_after` lets wait still adds them up.
    """

    def __init__(self, tensor: Tensor, own: Tensor, size: int, handle: dist.ProcessGroup) -> None:
        self._parts, self._own, self._size = torch.empty_like(tensor), own, size
        self._work = dist.all_to_all_single(self._parts, tensor, group=handle, async_op=True)

    def wait(self) -> None:
        """Add up what came."""
        self._work.wait()
        parts = self._parts.view(self._size, -1)
        self._own.copy_(parts.sum(0, dtype=torch.float32))
