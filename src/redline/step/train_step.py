"""One optimizer step: forward and backward of every microbatch, then the update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm import Group, Progress
from redline.data import Microbatch
from redline.model import DropoutState, dropout_keys
from redline.optim import StepResult
from redline.plan import ScheduleSpec
from redline.step.forward import microbatch_loss, wide_dtype
from redline.step.state import TrainState


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did.

    Attributes:
        loss: mean over the loss-bearing tokens of the global batch.
        lr: the learning rate it used.
        num_samples, num_tokens: sequences and tokens it ran, on all ranks (masked tokens included: they cost
            the same).
        time_s: wall time, the wait for the device included.
        wait_s: before it, for its data.
        result: of the optimizer.
    """

    loss: float
    lr: float
    num_samples: int
    num_tokens: int
    time_s: float
    result: StepResult
    wait_s: float = 0.0


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
    ) -> None:
        self.state, self.schedules, self.device = state, schedules, device
        self._empty_cache_level = empty_cache_level
        self._dp, self._progress = dp or Group(), progress or Progress()
        shape = state.shape
        drops = shape.hidden_dropout > 0 or shape.attention_dropout > 0
        self._dropout_keys = dropout_keys(seed, shape.num_layers, device) if drops else None

    def __call__(self, microbatches: Sequence[Microbatch]) -> StepOutcome:
        """One step over a global batch, of which `microbatches` are this rank's part.

        Raises: TrainingError when the step is not finite and the run is to stop then.
        """
        started = time.perf_counter()
        state, optimizer, progress = self.state, self.state.optimizer, self._progress
        progress.step = state.iteration + 1
        progress.begins("counting tokens")
        counted = self._count_tokens(microbatches)
        optimizer.buffers.zero_grad()
        if state.fp8 is not None:
            state.fp8.prepare()
        loss = self._accumulate(microbatches, optimizer.loss_scale.scale / counted.clamp(min=1).double())
        optimizer.ranks.reducer.finish()
        if self._dp.handle is not None:
            dist.all_reduce(loss, group=self._dp.handle)
        self._free_cache(1)

        progress.begins("optimizer step")
        at = state.schedule_samples
        lr = self.schedules.lr(at)
        result = optimizer.step(
            lr,
            self.schedules.weight_decay(at),
            decoupled_lr=self.schedules.decoupled_lr(at),
            loss=loss / optimizer.loss_scale.scale,
        )
        if state.fp8 is not None:
            state.fp8.step()
        self._free_cache(2)
        num_samples = sum(len(batch.tokens_BS) for batch in microbatches) * self._dp.size
        self._advance(result, num_samples, int(counted.item()))
        assert result.loss is not None
        num_tokens = sum(batch.tokens_BS.numel() for batch in microbatches) * self._dp.size
        return StepOutcome(result.loss, lr, num_samples, num_tokens, time.perf_counter() - started, result)

    def _count_tokens(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Tokens of the whole global batch that count in the loss, int64 on the device."""
        counted = sum(int(batch.loss_mask_BS.count_nonzero()) for batch in microbatches)
        total = torch.full((), counted, dtype=torch.int64, device=self.device)
        if self._dp.handle is not None:
            dist.all_reduce(total, group=self._dp.handle)
        return total

    def _accumulate(self, microbatches: Sequence[Microbatch], weight: Tensor) -> Tensor:
        """Forward and backward of each microbatch; returns the scaled loss, on the device."""
        model, dtype = self.state.model, wide_dtype(self.state.model)
        total = torch.zeros((), dtype=dtype, device=self.device)
        weight = weight.to(dtype)
        iteration = torch.full((), self.state.iteration, dtype=torch.int64, device=self.device)
        for number, batch in enumerate(microbatches):
            self._progress.begins(f"microbatch {number + 1} of {len(microbatches)}")
            if number == len(microbatches) - 1:
                self.state.optimizer.ranks.reducer.expect_last_backward()
            moved = batch.to(self.device, non_blocking=True)
            loss = microbatch_loss(model, moved, weight, self._dropout(moved, iteration))
            loss.backward()
            total += loss.detach()
        return total

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
