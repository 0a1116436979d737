"""AdamW over flat buffers.

Loshchilov and Hutter 2019, "Decoupled weight decay regularization", arXiv 1711.05101. With gradient g,

    p = p (1 - lr weight_decay)
    m = beta1 m + (1 - beta1) g                    exp_avg
    v = beta2 v + (1 - beta2) g^2                  exp_avg_sq
    p = p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

`adamw_reference` is that in plain PyTorch. The fast path is PyTorch's own fused kernel, which also divides
the gradient by a device scalar (loss scale over clip coefficient) and leaves everything as it is when
another device scalar says so: no pass over the gradients and no wait for the host.

Neighbouring parameters with the same hyperparameters are one long segment, and all segments of a buffer
with the same hyperparameters go into one call. The kernel wants one dtype for everything it touches:
what is stored in another dtype, or as two halves, passes through fixed scratch, a chunk at a time, with the
arithmetic in the main dtype. Redline's own kernel (adam_triton.py) takes every dtype as it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from redline.choice import Choice
from redline.errors import ConfigError
from redline.formulas.memory import OPTIMIZER_CHUNK
from redline.kernels.adamw import join_main, split_main
from redline.optim.adam_triton import TritonUpdate
from redline.optim.flat import Buffer, FlatBuffers, Kind
from redline.optim.groups import Group, segments

AdamImpl = Literal["auto", "fused", "triton", "reference"]

WHAT_RUNS = {
    "fused": "PyTorch's fused kernel: one pass over all state",
    "triton": "one kernel for clipping, update and rounding, each element read and written once",
    "reference": "the plain twin was asked for by name",
}
STAGED: tuple[Kind, ...] = ("main_grad", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """What does not change from step to step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    impl: AdamImpl = "auto"

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(
                f"--adam-eps {self.eps} is not above 0.",
                "an element whose gradients were all zero would be updated by 0/0.",
                "use 1e-8, or another small positive number.",
            )
        for flag, beta in (("--adam-beta1", self.beta1), ("--adam-beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(
                    f"{flag} {beta} is outside [0, 1).",
                    "it is the share of the running average that a step keeps.",
                    "use 0.9 for --adam-beta1 and 0.95 to 0.999 for --adam-beta2.",
                )


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    weight_decay: float,
    options: AdamOptions,
) -> None:
    """One AdamW update in place, in plain PyTorch; tensors of one shape and dtype, `step` counts from 1."""
    param.mul_(1 - lr * weight_decay)
    exp_avg.mul_(options.beta1).add_(grad, alpha=1 - options.beta1)
    exp_avg_sq.mul_(options.beta2).addcmul_(grad, grad, value=1 - options.beta2)
    mean = exp_avg / (1 - options.beta1**step)
    variance = exp_avg_sq / (1 - options.beta2**step)
    param.sub_(lr * mean / (variance.sqrt() + options.eps))


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the kernel: parallel lists of segments, all in the main dtype."""

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: Tensor  # [len(params)] fp32: the kernel wants a step count for every segment
    staged: list[tuple[Kind, Tensor, Tensor]]  # (kind, scratch, storage) of what is stored in another dtype
    halves: list[tuple[Tensor, Tensor, Tensor]]  # (scratch, parameter, remainder) of split main parameters

    def load(self) -> None:
        """Fill the scratch from storage."""
        for _, scratch, storage in self.staged:
            scratch.copy_(storage)
        for scratch, param, remainder in self.halves:
            scratch.copy_(join_main(param, remainder))

    def store(self) -> None:
        """Round or split the results back; where the update was skipped this is the identity."""
        for kind, scratch, storage in self.staged:
            if kind != "main_grad":
                storage.copy_(scratch)
        for scratch, *stored in self.halves:
            for half, value in zip(stored, split_main(scratch), strict=True):
                half.copy_(value)


def _all_launches(buffers: Sequence[Buffer], main_dtype: torch.dtype) -> Iterator[Launch]:
    """The calls that update all buffers, one after the other: what needs scratch shares it."""
    trainable = [buffer for buffer in buffers if buffer.trainable]
    largest = max((buffer.tensors["param"].numel() for buffer in trainable), default=0)
    scratch: dict[Kind, Tensor] = {}
    for buffer in trainable:
        for kind in _staged(buffer, main_dtype):
            if kind not in scratch:
                size = min(OPTIMIZER_CHUNK, largest)
                scratch[kind] = buffer.tensors["param"].new_empty(size, dtype=main_dtype)
    for buffer in trainable:
        yield from _launches(buffer, {kind: scratch[kind] for kind in _staged(buffer, main_dtype)})


def _staged(buffer: Buffer, main_dtype: torch.dtype) -> list[Kind]:
    """What is stored in another dtype than the main one."""
    kinds: tuple[Kind, ...] = ("main_param", *STAGED)
    return [kind for kind in kinds if buffer.tensors[kind].dtype != main_dtype]


def _launches(buffer: Buffer, scratch: dict[Kind, Tensor]) -> Iterator[Launch]:
    """The calls that update one buffer: one a group, or as many as it takes to stage through the scratch."""
    for group, ranges in segments(buffer.slots, buffer.window).items():
        for batch in _batches(ranges, OPTIMIZER_CHUNK) if scratch else [ranges]:
            yield _make_launch(buffer, group, batch, scratch)


def _batches(ranges: list[tuple[int, int]], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Cut and pack ranges into lists of at most `limit` elements together."""
    batch: list[tuple[int, int]] = []
    room = limit
    for first, last in ranges:
        for start in range(first, last, limit):
            end = min(start + limit, last)
            if end - start > room:
                yield batch
                batch, room = [], limit
            batch.append((start, end))
            room -= end - start
    yield batch


def _make_launch(
    buffer: Buffer, group: Group, ranges: list[tuple[int, int]], scratch: dict[Kind, Tensor]
) -> Launch:
    sizes = [end - start for start, end in ranges]
    staged: list[tuple[Kind, Tensor, Tensor]] = []
    halves: list[tuple[Tensor, Tensor, Tensor]] = []

    def operands(kind: Kind) -> list[Tensor]:
        stored = [buffer.tensors[kind][start:end] for start, end in ranges]
        if kind not in scratch:
            return stored
        wide = list(scratch[kind][: sum(sizes)].split(sizes))
        if kind == "main_param":
            params = [buffer.tensors["param"][start:end] for start, end in ranges]
            halves.extend(zip(wide, params, stored, strict=True))
        else:
            staged.extend((kind, *pair) for pair in zip(wide, stored, strict=True))
        return wide

    params, grads, exp_avgs, exp_avg_sqs = (operands(kind) for kind in ("main_param", *STAGED))
    steps = torch.zeros(len(ranges), device=params[0].device)
    return Launch(group, params, grads, exp_avgs, exp_avg_sqs, steps, staged, halves)


class AdamW:
    """The update of all trainable parameters of `buffers`, in place.

    Attributes:
        choice: which implementation runs, and why.
    """

    def __init__(self, buffers: FlatBuffers, options: AdamOptions) -> None:
        self.options = options
        self._buffers = buffers
        ran = "fused" if options.impl == "auto" else options.impl
        self.choice = Choice("optimizer-impl", options.impl, ran, WHAT_RUNS[ran])
        self._update = self._reference_update if ran == "reference" else self._fused_update
        self._triton: TritonUpdate | None = None
        self._launches: list[Launch] = []
        if ran == "triton":
            self._triton = TritonUpdate(buffers.shards, options.beta1, options.beta2, options.eps)
        else:
            self._launches = list(_all_launches(buffers.shards, buffers.main_dtype))

    def step(
        self,
        step: int,
        *,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Apply update number `step` (from 1) to the main parameters, and round them into the parameters.

        Args:
            lr, weight_decay: of this step.
            decoupled_lr: learning rate of word embedding and head; None means `lr`.
            grad_scale: device scalar that every gradient is divided by. The gradients may be left divided.
            found_inf: device scalar; where it is 1, parameters and moments stay as they are, bit for bit.
        """
        if self._triton is not None:
            self._triton.step(
                step,
                lr=lr,
                weight_decay=weight_decay,
                decoupled_lr=decoupled_lr,
                grad_factor=None if grad_scale is None else grad_scale.reciprocal(),
                found_inf=found_inf,
            )
            return
        for launch in self._launches:
            launch.load()
            rate = decoupled_lr if launch.group.decoupled and decoupled_lr is not None else lr
            decay = weight_decay if launch.group.decays else 0.0
            self._update(launch, step, rate, decay, grad_scale, found_inf)
            launch.store()
        self._buffers.sync_params()

    def _fused_update(
        self,
        launch: Launch,
        step: int,
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if grad_scale is not None and launch.params[0].dtype == torch.float64:
            for grad in launch.grads:  # the kernel's scale is fp32, which float64 must not be rounded to
                grad.div_(grad_scale)
            grad_scale = None
        launch.steps.fill_(step - 1)  # the kernel's caller counts up, and back where found_inf is set
        adamw(
            launch.params,
            launch.grads,
            launch.exp_avgs,
            launch.exp_avg_sqs,
            [],
            list(launch.steps),
            fused=True,
            grad_scale=None if grad_scale is None else grad_scale.float(),
            found_inf=None if found_inf is None else found_inf.float(),
            amsgrad=False,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.options.eps,
            maximize=False,
        )

    def _reference_update(
        self,
        launch: Launch,
        step: int,
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        for param, grad, exp_avg, exp_avg_sq in zip(
            launch.params, launch.grads, launch.exp_avgs, launch.exp_avg_sqs, strict=True
        ):
            if grad_scale is not None:
                grad.div_(grad_scale)
            adamw_reference(
                param, grad, exp_avg, exp_avg_sq, step, lr=lr, weight_decay=weight_decay, options=self.options
            )
