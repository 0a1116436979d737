"""Saving: `save_checkpoint`, at once or with an `AsyncWriter` in the background.

An asynchronous save returns as soon as a snapshot of the tensors lies in host memory; a thread then writes
it. DCP's own `save` runs in that thread, planning included, and the caller waits until the writer has taken
the snapshot. So planning's collectives never overlap the caller's, only what this rank will write is copied,
and single-process and many-rank saves are one code path.

A background save that failed is known only when the next one begins. That one is then made at once, so that
its own fate is known: one full disk in the middle of a run costs one checkpoint and not the run. DCP tells
every rank of a failure on any of them, so all of them change to saving at once together.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from redline.checkpoint.dcp import one_process_is_fine, plain_errors
from redline.checkpoint.folders import folder_name
from redline.checkpoint.staging import StagingBuffers
from redline.checkpoint.values import values_to_json
from redline.checkpoint.writer import CheckpointWriter, Resolve, Waits, waits_unseen
from redline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one call of `save_checkpoint` cost its caller.

    Attributes:
        folder: where the checkpoint is, or will be once a background save is complete.
        waited_s: seconds spent waiting for the previous background save.
        blocked_s: seconds of the snapshot, or of the whole save without a writer.
    """

    folder: Path
    waited_s: float
    blocked_s: float


class AsyncWriter:
    """Writes checkpoints in the background, at most one at a time.

    A failed save raises its CheckpointError from `wait` or from `close`, once, unless another save came
    first: that one tells it and is made at once. The writer can be used on. As a context manager it waits at
    the end of the block.

    Args:
        group: the ranks that save together; None for a single process. It must be able to move CPU objects
            (Gloo) and be used for nothing else, since the background thread ends a save with a collective.

    Attributes:
        iteration: of the save begun last, None before the first.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.iteration: int | None = None
        self._buffers = StagingBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as lost:
            if error is None:
                raise
            error.add_note(f"and the last checkpoint failed: {lost}")

    @property
    def busy(self) -> bool:
        """Whether a save is in flight; any thread may ask."""
        saving = self._saving
        return saving is not None and not saving.done()

    def start(self, storage: CheckpointWriter, tensors: Mapping[str, Tensor]) -> None:
        """Take the snapshot, then return and leave the writing to the thread. `wait` must have been called.

        Raises: CheckpointError when planning or the snapshot fails.
        """
        assert self._saving is None, "the previous save was not waited for"
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the thread copies on its own stream
        taken: Future[None] = Future()
        self.iteration = storage.iteration

        def snapshot(plan: SavePlan, planner: SavePlanner) -> Resolve:
            resolve = self._buffers.snapshot(plan, planner)
            taken.set_result(None)
            return resolve

        storage.snapshot = snapshot
        with one_process_is_fine():
            self._saving = self._thread.submit(_save, storage, tensors, self.group)
            wait([taken, self._saving], return_when=FIRST_COMPLETED)
        if not taken.done():
            self.wait()

    def wait(self) -> float:
        """Wait for the save in flight, if any; returns the seconds it took. Raises its error."""
        if self._saving is None:
            return 0.0
        started = time.perf_counter()
        wait([self._saving])
        saving, self._saving = self._saving, None
        saving.result()
        return time.perf_counter() - started

    def close(self) -> None:
        """Wait for the save in flight, raise its error, end the thread and free the staging memory."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers = StagingBuffers()


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    writer: AsyncWriter | None = None,
    group: dist.ProcessGroup | None = None,
    waits: Waits = waits_unseen,
    tell: Callable[[str], object] = warnings.warn,
) -> SaveReport:
    """Save `tensors` and `values` as `root/iter_<iteration>` and make it the latest checkpoint.

    The folder appears under its name only when complete and on the disk; an older checkpoint of the same
    iteration is replaced. State may be changed as soon as the call returns.

    Args:
        tensors: by logical name; any dtype, device and strides. DTensors and other tensors with DCP's
            sharding methods are saved by chunks. Names contain no "@".
        values: everything else, as JSON; of the first rank where there are several.
        keep: how many of the newest checkpoints stay, this one included (None: all).
        keep_every: checkpoints whose iteration is a multiple of this stay in any case.
        writer: saves in the background, on its group's ranks; None saves at once. Where its previous save was
            lost, this one is made at once too.
        group: without a writer, the ranks that save together; None for a single process.
        waits: of a save made at once, called with what this rank begins to wait for the others in.
        tell: called with a sentence where the previous save of `writer` was lost, before this one begins.

    Raises: CheckpointError when this save cannot be written (full disk, no permission), or when `values` are
        no JSON. Older checkpoints are then as they were.
    """
    content = values_to_json(values)
    waited_s, lost = _previous(writer)
    if writer is not None and lost is not None:
        tell(
            f"the checkpoint of iteration {writer.iteration} is lost: {lost.what} "
            f"That of iteration {iteration} is now written at once, not in the background."
        )
        group, writer = writer.group, None
    started = time.perf_counter()
    storage = CheckpointWriter(
        root,
        iteration,
        content,
        keep=keep,
        keep_every=keep_every,
        waits=waits if writer is None else waits_unseen,
    )
    if writer is not None:
        writer.start(storage, tensors)
    else:
        with one_process_is_fine():
            _save(storage, tensors, group)
    return SaveReport(root / folder_name(iteration), waited_s, time.perf_counter() - started)


def _previous(writer: AsyncWriter | None) -> tuple[float, CheckpointError | None]:
    """Seconds spent waiting for the save in flight, and its error where it was lost, the same on all ranks.

    Anything but a CheckpointError (a rank that is gone, a bug) is raised: ranks may differ in it.
    """
    if writer is None:
        return 0.0, None
    started = time.perf_counter()
    try:
        return writer.wait(), None
    except CheckpointError as lost:
        return time.perf_counter() - started, lost


def _save(storage: CheckpointWriter, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with plain_errors():
            save(
                dict(tensors),
                storage_writer=storage,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except BaseException:
        storage.abandon()
        raise
