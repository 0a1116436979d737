"""Traces written by hand, in the shape the profiler gives them, with times in microseconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.ledger.trace import Trace, read_trace

MAIN, AUTOGRAD, LOADER = 100, 101, 102
PROCESS = 7


class TraceFile:
    """Collects events and writes them as the profiler does."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: str = "NVIDIA H200",
        groups: Mapping[str, list[int]] | None = None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}] if device else [],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        }
        if groups is not None:
            self.head["distributedInfo"]["pg_config"] = [
                {"pg_desc": name, "pg_size": len(ranks), "ranks": ranks} for name, ranks in groups.items()
            ]
        self._correlation = 0
        self._flow = 0

    def span(
        self, category: str, name: str, start: float, dur: float, thread: Any = MAIN, **args: Any
    ) -> dict[str, Any]:
        event = {
            "ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread,
            "ts": start, "dur": dur, "args": args,
        }  # fmt: skip
        self.events.append(event)
        return event

    def mark(self, name: str, start: float, dur: float, thread: int = MAIN) -> None:
        self.span("user_annotation", name, start, dur, thread)

    def op(self, name: str, start: float, dur: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
        """`sequence`, `backward`, `dims` and `types` become what the profiler calls them."""
        named = {}
        if "sequence" in args:
            named = {"Sequence number": args["sequence"], "Fwd thread id": int(args.get("backward", False))}
        if "dims" in args:
            dims = args["dims"]
            named |= {"Input Dims": dims, "Input type": args.get("types", ["c10::BFloat16"] * len(dims))}
        return self.span("cpu_op", name, start, dur, thread, **named)

    def runtime(self, name: str, start: float, dur: float, thread: int = MAIN, correlation: int = 0) -> None:
        self.span("cuda_runtime", name, start, dur, thread, correlation=correlation)

    def kernel(
        self,
        name: str,
        start: float,
        dur: float,
        *,
        launched: float,
        thread: int = MAIN,
        stream: int = 7,
        category: str = "kernel",
        launch_us: float = 4.0,
        **args: Any,
    ) -> None:
        """A kernel and the call that launched it."""
        self._correlation += 1
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}.get(
            category, "cudaMemsetAsync"
        )
        self.runtime(call, launched, launch_us, thread, self._correlation)
        self.span(category, name, start, dur, stream, stream=stream, correlation=self._correlation, **args)

    def arrow(self, forward: dict[str, Any], backward: dict[str, Any]) -> None:
        """From a forward operator to its backward node."""
        self._flow += 1
        for ph, event in (("s", forward), ("f", backward)):
            self.events.append(
                {"ph": ph, "id": self._flow, "pid": PROCESS, "tid": event["tid"], "ts": event["ts"],
                 "cat": "fwdbwd", "name": "fwdbwd"}
            )  # fmt: skip

    def text(self) -> str:
        """With the profiler's line breaks."""
        head = json.dumps(self.head)[:-1]
        events = ",".join("\n  " + json.dumps(event, indent=2).replace("\n", "\n  ") for event in self.events)
        return f'{head},\n  "traceEvents": [{events}\n  ],\n  "traceName": "by hand"\n}}\n'

    def write(self, path: Path) -> Path:
        content = self.text().encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    def read(self, folder: Path) -> Trace:
        return read_trace(self.write(folder / "trace.json"))
