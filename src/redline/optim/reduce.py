"""Gradients summed over data-parallel ranks, bucket by bucket, in the last microbatch or after it.

When a parameter's gradient is complete its accumulate-grad hook fires, whoever wrote the gradient: autograd's
own, which the hook in flat.py adds to `main_grad`, or a GEMM site, which adds to `main_grad` itself and hands
autograd None. A hook may fire several times in a backward (a weight used inside recomputed segments), so the
first step counts, and sends everything at its end; from the second step on a bucket goes as soon as all its
parameters have fired as often as then. Buckets go in one order on all ranks: a bucket that is ready before
its turn waits for it.

Where several groups of ranks hold a copy of the states a bucket goes twice, in the same order: inside its
group, and, once that is summed, across the groups. On a GPU a stream waits for the first sum; on a CPU, where
nothing waits but the host, the next hook that fires sees that it has come.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from redline.comm import Sent, Transport, Work
from redline.optim.flat import FlatBuffers


@dataclass(slots=True)
class Bucket:
    """Gradients that are sent together.

    Attributes:
        grads: [n] the flat gradients, padding included.
        own: [n / ranks] this rank's part of them.
        waits_for: firings of hooks that are still to come, by parameter.
    """

    grads: Tensor
    own: Tensor
    names: tuple[str, ...]
    waits_for: Counter[str] = field(default_factory=Counter)
    work: Work | None = None

    @property
    def ready(self) -> bool:
        """Whether every gradient in it is complete."""
        return not self.waits_for


class GradReducer:
    """Sums `main_grad` over ranks: an all-reduce of each bucket, or a reduce-scatter of it to the owners.

    Args:
        buffers: whose gradients.
        shard: the ranks that share each bucket.
        replica: the ranks that own the same part, where several groups of ranks hold a copy of the states.
        scatter: leave to each rank the sum of its own part alone.
        overlap: send during the backward pass.
    """

    def __init__(
        self, buffers: FlatBuffers, shard: Transport, replica: Transport, *, scatter: bool, overlap: bool
    ) -> None:
        self._shard, self._replica, self._scatter = shard, replica, scatter
        self.buckets = [
            Bucket(
                buffer.tensors["main_grad"][start:end],
                buffer.tensors["main_grad"][slice(*buffers.sharding.own((start, end)))],
                tuple(slot.name for slot in buffer.slots if start <= slot.start < end and slot.shape.numel()),
            )
            for buffer in buffers.buffers
            if buffer.trainable
            for start, end in buffer.buckets
        ]
        # As backward completes them, whatever buffer they lie in: that of norms and embedding is the last.
        self.buckets.sort(key=lambda bucket: buffers.first_use(bucket.names), reverse=True)
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._fired: Counter[str] = Counter()
        self._wanted: Counter[str] | None = None
        self._next = 0
        self._inside: deque[Bucket] = deque()  # sent inside the group, and not yet across the groups
        self._armed = False
        self._overlaps = overlap and (shard.size > 1 or replica.size > 1)
        if self._overlaps:
            for name in self._bucket_of:
                hook = partial(self._fire, name)
                buffers.parameters[name].register_post_accumulate_grad_hook(hook)

    def expect_last_backward(self) -> None:
        """The backward pass that follows is the step's last: what it completes may be sent."""
        self._armed = self._overlaps
        self._fired.clear()
        self._inside.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.work = None
            bucket.waits_for = Counter() if self._wanted is None else self._expected(bucket)

    def finish(self) -> None:
        """After that backward: send what is left and wait for all of it."""
        if self._armed and self._wanted is None:
            self._wanted = self._fired.copy()
        self._armed = False
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        self._next = len(self.buckets)
        while self._inside:
            self._send_across()
        for bucket in self.buckets:
            _sent(bucket).wait()
            bucket.work = None  # with what it may hold to receive into

    def _expected(self, bucket: Bucket) -> Counter[str]:
        """A parameter without a gradient so far keeps its bucket until the end: one may yet come."""
        assert self._wanted is not None
        return Counter({name: max(self._wanted[name], 1) for name in bucket.names})

    def _fire(self, name: str, param: Tensor) -> None:
        if not self._armed:
            return
        self._fired[name] += 1
        if self._wanted is None:
            return
        bucket = self._bucket_of[name]
        assert bucket.work is None, f"a gradient of {name} came after its bucket was sent"
        if bucket.waits_for[name] > 1:
            bucket.waits_for[name] -= 1
        else:
            del bucket.waits_for[name]
        while self._next < len(self.buckets) and self.buckets[self._next].ready:
            self._send(self.buckets[self._next])
            self._next += 1
        self._follow()

    def _send(self, bucket: Bucket) -> None:
        if self._scatter:
            bucket.work = self._shard.reduce_scatter(bucket.grads)
        else:
            bucket.work = self._shard.all_reduce(bucket.grads)
        if self._replica.size > 1:
            self._inside.append(bucket)
            self._follow()

    def _follow(self) -> None:
        """Send across what has been summed inside, in the order of the buckets."""
        while self._inside and self._replica.can_follow(_first(self._inside[0])):
            self._send_across()

    def _send_across(self) -> None:
        bucket = self._inside.popleft()
        summed = bucket.own if self._scatter else bucket.grads
        bucket.work = self._replica.all_reduce_after(_first(bucket), summed)


def _sent(bucket: Bucket) -> Work:
    assert bucket.work is not None
    return bucket.work


def _first(bucket: Bucket) -> Sent:
    """The sum inside, which one across follows."""
    assert isinstance(bucket.work, Sent), "a wide sum, which the start refuses beside instances"
    return bucket.work
