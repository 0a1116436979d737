"""AdamW by PyTorch's own kernels, or by the plain twin, a buffer after the other.

Neighbouring parameters with the same hyperparameters are one long segment, and all segments of a buffer
with the same hyperparameters go into one call. The kernel wants one dtype for everything it touches:
what is stored in another dtype, as two halves or in 8 bits, passes through fixed scratch, a chunk at a time,
with the arithmetic in the main dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from redline.formulas.memory import OPTIMIZER_CHUNK
from redline.formulas.state import CODE_BLOCK
from redline.kernels.adamw import decode, encode_into, join_main, noise_of, round_bf16, salt_of, split_main
from redline.optim.adam_options import AdamOptions, Step
from redline.optim.buffer import MOMENTS, TOPS, Buffer, Kind
from redline.optim.groups import Group, segments
from redline.optim.states import CODES, round_main

STAGED: tuple[Kind, ...] = ("main_grad", *MOMENTS)


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
    staged: list[tuple[Kind, Tensor, Tensor, Tensor]]  # (kind, scratch, storage, main) where dtypes differ
    halves: list[tuple[Tensor, Tensor, Tensor]]  # (scratch, parameter, remainder) of split main parameters
    coded: list[tuple[Kind, Tensor, Tensor, Tensor, Tensor]]  # (kind, scratch, codes, tops, main parameter)

    def load(self) -> None:
        """Fill the scratch from storage."""
        for _, scratch, storage, _ in self.staged:
            scratch.copy_(storage)
        for scratch, param, remainder in self.halves:
            scratch.copy_(join_main(param, remainder))
        for kind, scratch, codes, tops, _ in self.coded:
            scratch.copy_(decode(codes, tops, signed=kind == "exp_avg"))

    def store(self, step: int) -> None:
        """Round, encode or split the results back; where the update was skipped this is the identity."""
        salt = salt_of(step)
        for kind, scratch, storage, main in self.staged:
            if kind == "main_grad":
                continue
            if storage.dtype == torch.bfloat16:
                storage.copy_(round_bf16(scratch, noise_of(main.float(), salt)[MOMENTS.index(kind)]))
            else:
                storage.copy_(scratch)
        for kind, scratch, codes, tops, main in self.coded:
            noise = noise_of(main, salt)[MOMENTS.index(kind)]
            encode_into(codes, tops, scratch, noise, signed=kind == "exp_avg")
        for scratch, *stored in self.halves:
            for half, value in zip(stored, split_main(scratch), strict=True):
                half.copy_(value)


def _all_launches(buffers: Sequence[Buffer], main_dtype: torch.dtype) -> Iterator[list[Launch]]:
    """The calls that update each buffer; what needs scratch shares it, over all buffers."""
    largest = max((buffer.tensors["param"].numel() for buffer in buffers), default=0)
    scratch: dict[Kind, Tensor] = {}
    for buffer in buffers:
        for kind in _staged(buffer, main_dtype):
            if kind not in scratch:
                size = min(OPTIMIZER_CHUNK, largest)
                scratch[kind] = buffer.tensors["param"].new_empty(size, dtype=main_dtype)
        yield list(_launches(buffer, {kind: scratch[kind] for kind in _staged(buffer, main_dtype)}))


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
    staged: list[tuple[Kind, Tensor, Tensor, Tensor]] = []
    halves: list[tuple[Tensor, Tensor, Tensor]] = []
    coded: list[tuple[Kind, Tensor, Tensor, Tensor, Tensor]] = []

    def operands(kind: Kind) -> list[Tensor]:
        stored = [buffer.tensors[kind][start:end] for start, end in ranges]
        if kind not in scratch:
            return stored
        wide = list(scratch[kind][: sum(sizes)].split(sizes))
        if kind == "main_param":
            params = [buffer.tensors["param"][start:end] for start, end in ranges]
            halves.extend(zip(wide, params, stored, strict=True))
        elif buffer.tensors[kind].dtype == CODES:
            tops = buffer.tensors[TOPS[kind]]
            for each, codes, (start, end), main in zip(wide, stored, ranges, mains, strict=True):
                coded.append((kind, each, codes, tops[start // CODE_BLOCK : end // CODE_BLOCK], main))
        else:
            staged.extend((kind, *pair) for pair in zip(wide, stored, mains, strict=True))
        return wide

    mains = operands("main_param")
    grads, exp_avgs, exp_avg_sqs = (operands(kind) for kind in STAGED)
    steps = torch.zeros(len(ranges), device=mains[0].device)
    return Launch(group, mains, grads, exp_avgs, exp_avg_sqs, steps, staged, halves, coded)


class TorchUpdate:
    """The update of trainable `buffers`, in place.

    Attributes:
        launches: the calls of each buffer.
    """

    def __init__(self, buffers: Sequence[Buffer], options: AdamOptions, main_dtype: torch.dtype) -> None:
        self._buffers, self._options = buffers, options
        self.launches = list(_all_launches(buffers, main_dtype))
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        """Take note of the step."""
        self._step = step

    def apply(self, index: int) -> None:
        """Update one buffer, and round its main parameters into its parameters."""
        step, tensors = self._step, self._buffers[index].tensors
        assert step is not None
        update = self._reference_update if self._options.impl == "reference" else self._fused_update
        for launch in self.launches[index]:
            launch.load()
            update(launch, step)
            launch.store(step.number)
        round_main(tensors["main_param"], tensors["param"])

    def _fused_update(self, launch: Launch, step: Step) -> None:
        grad_scale, found_inf = step.grad_scale, step.found_inf
        if grad_scale is not None and launch.params[0].dtype == torch.float64:
            for grad in launch.grads:  # the kernel's scale is fp32, which float64 must not be rounded to
                grad.div_(grad_scale)
            grad_scale = None
        launch.steps.fill_(step.number - 1)  # the kernel's caller counts up, and back where found_inf is set
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
            beta1=self._options.beta1,
            beta2=self._options.beta2,
            lr=step.rate(launch.group),
            weight_decay=step.decay(launch.group),
            eps=self._options.eps,
            maximize=False,
        )

    def _reference_update(self, launch: Launch, step: Step) -> None:
        if step.found_inf is not None and step.found_inf.item():
            return
        for param, grad, exp_avg, exp_avg_sq in zip(
            launch.params, launch.grads, launch.exp_avgs, launch.exp_avg_sqs, strict=True
        ):
            if step.grad_scale is not None:
                grad.div_(step.grad_scale)
            adamw_reference(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                step.number,
                lr=step.rate(launch.group),
                weight_decay=step.decay(launch.group),
                options=self._options,
            )
