"""One optimizer step: forward and backward of every microbatch, then the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm import Group, Progress
from redline.data import Microbatch
from redline.formulas.flops import Attended, attended
from redline.model import DropoutState, dropout_keys
from redline.optim import StepResult
from redline.plan import ScheduleSpec
from redline.step.forward import microbatch_loss, wide_dtype
from redline.step.graph import MicrobatchGraph
from redline.step.state import TrainState


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did.

    Attributes:
        loss: mean cross-entropy over the loss-bearing tokens of the global batch.
        lr: the learning rate it used.
        num_samples, num_tokens: sequences and tokens it ran, on all ranks (masked tokens included: they cost
            the same; what pads packed samples is left out).
        attended: the scores of its attention, from the lengths of samples or of packed documents.
        time_s: wall time, the wait for the device included.
        wait_s: before it, for its data.
        z_loss: what the z-loss added to that mean; None without one.
        own_s: of it, forward and backward without waits for other ranks; None where nobody asked.
        result: of the optimizer.
    """

    loss: float
    lr: float
    num_samples: int
    num_tokens: int
    attended: Attended
    time_s: float
    result: StepResult
    wait_s: float = 0.0
    z_loss: float | None = None
    own_s: float | None = None


class TrainStep:
    """Runs optimizer steps on a TrainState.

    Args:
        state: what is trained.
        schedules: learning rate and weight decay by applied samples.
        seed: of the dropout masks.
        device: of the model.
        empty_cache_level: 1 frees cached device memory after the backward, 2 also after the update
            (`--empty-unused-memory-level`).
        dp: the ranks that see other samples of each global batch.
        progress: learns which part of the step this rank has begun.
        graph_warmup_steps: record a microbatch as a CUDA graph after so many steps; None: never.
        say: told when that is done, and when a GEMM returns from fp8 to bf16.
        z_loss: weight of the squared log-partition in the loss that is trained on.
        fp8_stats_interval: steps between those that count what casts to fp8 lose; None: never.
        after_forward: called between the forward and the backward of each microbatch (of a CUDA graph: once).
    """

    def __init__(
        self,
        state: TrainState,
        schedules: ScheduleSpec,
        *,
        seed: int,
        device: torch.device,
        empty_cache_level: int = 0,
        dp: Group | None = None,
        progress: Progress | None = None,
        graph_warmup_steps: int | None = None,
        z_loss: float = 0.0,
        fp8_stats_interval: int | None = None,
        say: Callable[[str], object] = lambda _: None,
        after_forward: Callable[[], object] = lambda: None,
    ) -> None:
        self.state, self.schedules, self.device = state, schedules, device
        self._empty_cache_level = empty_cache_level
        self._fp8_stats_interval, self._say = fp8_stats_interval, say
        self._after_forward = after_forward
        self._dp, self._progress = dp or Group(), progress or Progress()
        shape = state.shape
        drops = shape.hidden_dropout > 0 or shape.attention_dropout > 0
        self._dropout_keys = dropout_keys(seed, shape.num_layers, device) if drops else None
        self._z_loss, self._z_total = z_loss, None
        if z_loss:  # one place for all steps: a CUDA graph writes where it was recorded to
            self._z_total = torch.zeros((), dtype=wide_dtype(state.model), device=device)
        self.work: tuple[int, Attended] | None = None  # tokens and scores of the newest step
        self._graph = None
        if graph_warmup_steps is not None:
            self._graph = MicrobatchGraph(self._microbatch, device, graph_warmup_steps, say)

    def __call__(self, microbatches: Sequence[Microbatch]) -> StepOutcome:
        """One step over a global batch, of which `microbatches` are this rank's part.

        Raises: TrainingError when the step is not finite and the run is to stop then.
        """
        started = time.perf_counter()
        state, optimizer, progress = self.state, self.state.optimizer, self._progress
        progress.step = state.iteration + 1
        progress.begins("counting tokens")
        counts = self._count_tokens(microbatches)
        optimizer.buffers.zero_grad()
        if state.fp8 is not None:
            every = self._fp8_stats_interval
            state.fp8.begin_step(looks=every is not None and (state.iteration + 1) % every == 0)
        if progress.pace is not None:
            progress.pace.starts()
        loss = self._accumulate(microbatches, optimizer.loss_scale.scale / counts[0].clamp(min=1).double())
        if progress.pace is not None:
            progress.pace.stops()
        optimizer.ranks.reducer.finish()
        parts = loss if self._z_total is None else torch.stack((loss, self._z_total))
        if self._dp.handle is not None:
            self._dp.sends("all-reduce of the loss")
            dist.all_reduce(parts, group=self._dp.handle)
        parts = parts / optimizer.loss_scale.scale
        self._free_cache(1)

        progress.begins("optimizer step")
        at = state.schedule_samples
        lr = self.schedules.lr(at)
        result = optimizer.step(
            lr,
            self.schedules.weight_decay(at),
            decoupled_lr=self.schedules.decoupled_lr(at),
            loss=parts if self._z_total is None else parts[0],
            after_update=self._renew_scales,
        )
        self._free_cache(2)
        progress.patient = False  # the first step has ended
        progress.begins("after the step")
        num_samples = sum(batch.num_samples for batch in microbatches) * self._dp.size
        num_counted, num_tokens, *scores = counts.tolist()
        self.work = num_tokens, Attended(*scores)
        self._advance(result, num_samples, num_counted)
        assert result.loss is not None
        z_loss = None if self._z_total is None else parts[1].item()
        took = time.perf_counter() - started
        own_s = None if progress.pace is None else progress.pace.worked_s()
        entropy = result.loss - (z_loss or 0.0)
        return StepOutcome(entropy, lr, num_samples, *self.work, took, result, z_loss=z_loss, own_s=own_s)

    def _count_tokens(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Of the whole global batch: tokens that count in the loss, all tokens, `Attended`; int64 [4]."""
        counted = [
            sum(int(batch.loss_mask_BS.count_nonzero()) for batch in microbatches),
            sum(batch.num_tokens for batch in microbatches),
            *attended(self.state.shape, (length for batch in microbatches for length in batch.lengths)),
        ]
        total = torch.tensor(counted, dtype=torch.int64, device=self.device)
        if self._dp.handle is not None:
            self._dp.sends("all-reduce of counts")
            dist.all_reduce(total, group=self._dp.handle)
        return total

    def _accumulate(self, microbatches: Sequence[Microbatch], weight: Tensor) -> Tensor:
        """Forward and backward of each microbatch; returns the scaled loss, on the device."""
        dtype = wide_dtype(self.state.model)
        if self._z_total is not None:
            self._z_total.zero_()
        total = torch.zeros((), dtype=dtype, device=self.device)
        weight = weight.to(dtype)
        iteration = torch.full((), self.state.iteration, dtype=torch.int64, device=self.device)
        if self._graph is not None:
            self._graph.next_step()
        for number, batch in enumerate(microbatches):
            self._progress.begins(f"microbatch {number + 1} of {len(microbatches)}")
            if number == len(microbatches) - 1:
                self.state.optimizer.ranks.reducer.expect_last_backward()
            if self._graph is not None:
                total += self._graph(batch, weight, iteration)
            else:
                total += self._microbatch(batch.to(self.device, non_blocking=True), weight, iteration)
        return total

    def _microbatch(self, batch: Microbatch, weight: Tensor, iteration: Tensor) -> Tensor:
        """Forward and backward of one microbatch on the device; returns its share of the loss."""
        z = self._z_loss, self._z_total
        loss = microbatch_loss(self.state.model, batch, weight, self._dropout(batch, iteration), *z)
        self._after_forward()
        loss.backward()
        return loss.detach()

    def _renew_scales(self) -> None:
        """Of fp8, once the parameters are updated."""
        fp8, step = self.state.fp8, self.state.iteration + 1
        for site, operand in fp8.step().items() if fp8 is not None else ():
            assert fp8 is not None
            self.state.returned[site] = step
            row = f"{fp8.state.spec.patience} steps in a row, up to step {step} (--fp8-return-to-bf16)"
            self._say(f"{site} runs in bf16 from here on: its operand {operand} saturated in {row}.")

    def _dropout(self, batch: Microbatch, iteration: Tensor) -> DropoutState | None:
        if self._dropout_keys is None:
            return None
        return DropoutState(keys=self._dropout_keys, iteration=iteration, sample_index_B=batch.sample_index_B)

    def _advance(self, result: StepResult, num_samples: int, counted_tokens: int) -> None:
        state = self.state
        state.iteration += 1
        state.consumed_samples += num_samples
        state.consumed_tokens += counted_tokens
        state.schedule_samples += num_samples * result.applied
        state.nonfinite_steps += result.nonfinite is not None and not result.overflow

    def _free_cache(self, level: int) -> None:
        if self._empty_cache_level >= level and self.device.type == "cuda":
            torch.cuda.empty_cache()
