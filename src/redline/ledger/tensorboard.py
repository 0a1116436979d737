"""TensorBoard events through the tensorboard package's own records: no torch, no TensorFlow, no thread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.errors import ConfigError, TrainingError
from redline.files import os_errors_as


class EventWriter:
    """Scalars into one event file.

    Args:
        folder: where TensorBoard will look; made when missing.
        resumed_step: what older files of the folder say about later steps is void.

    Raises: ConfigError when the tensorboard package is not installed, TrainingError when the folder is not
        writable.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ConfigError(
                f"--tensorboard-dir {folder} needs the tensorboard package, which is not installed.",
                why="events are written by that package's own writer.",
                mend="pip install tensorboard, or leave it out: metrics.jsonl holds the same numbers.",
            ) from None
        self._event, self._summary, self._folder = event_pb2, summary_pb2, folder
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with os_errors_as(TrainingError, folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115 - close() closes it
        self._write(file_version="brain.Event:2")
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resumed_step + 1, session_log=start)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write these values for `step`."""
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        with os_errors_as(TrainingError, self._folder, "write"):
            self._writer.close()

    def _write(self, **fields: Any) -> None:
        """One event, handed to the system at once: no thread stands between a full disk and the run."""
        event = self._event.Event(wall_time=time.time(), **fields)
        with os_errors_as(TrainingError, self._folder, "write"):
            self._writer.write(event.SerializeToString())
            self._writer.flush()
