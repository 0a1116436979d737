"""Reads a trace of torch.profiler (Chrome's JSON, plain or gzipped) into host and device events.

The files are large: 200 MB for a step of a big model. The events are decoded a piece at a time, cut where the
profiler ends one, and only what the ledger uses is kept. A file that another program has written anew, with
other line breaks, is decoded whole.

Times are whole nanoseconds, so that sums of intervals are exact.
"""

from __future__ import annotations

import gc
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import DataError

PIECE_BYTES = 8 << 20
EVENT_END = b"\n  },"  # how the profiler closes an event; what it nests is indented deeper
GZIP_MAGIC = b"\x1f\x8b"
LONGEST = 1 << 40  # dimension of a tensor
LATEST = 1 << 62  # nanoseconds that numpy can add up; the profiler counts from 1970

# Categories of the events that run on a device, and of those that a host thread spends time in.
KERNEL, COPY, FILL = "kernel", "gpu_memcpy", "gpu_memset"
DEVICE_CATEGORIES = frozenset((KERNEL, COPY, FILL))
RUNTIME_CATEGORIES = frozenset(("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"))
HOST_CATEGORIES = frozenset(("cpu_op", "user_annotation")) | RUNTIME_CATEGORIES
MODULE_CALL = "nn.Module: "  # a python_function event that is a module's forward (with_stack=True)


Place = tuple[int, int]  # thread and start of a host event


@dataclass(slots=True)
class HostEvent:
    """A span of one host thread: an operator, a mark, or a call of the device's runtime.

    Attributes:
        start, end: nanoseconds.
        thread: which thread; equal numbers, equal thread.
        correlation: joins a runtime call to the device events it starts; 0 without.
        sequence: number of the autograd node an operator makes, or that a backward runs; -1 without.
        is_backward: whether `sequence` is that of a node being run, not made.
        dims, types: of the inputs, empty where shapes were not recorded.
    """

    start: int
    end: int
    name: str
    category: str
    thread: int
    correlation: int = 0
    sequence: int = -1
    is_backward: bool = False
    dims: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    collective: Mapping[str, Any] | None = None


@dataclass(slots=True)
class DeviceEvent:
    """A kernel, copy or fill on one stream of the device."""

    start: int
    end: int
    name: str
    category: str
    stream: int
    correlation: int = 0
    num_bytes: int = 0
    collective: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's trace.

    Attributes:
        host, device: by start.
        device_marks: the host's marks, each from the first to the last kernel launched inside it.
        forward_of: of a backward node, by thread and start, the thread and start of its forward operator.
        rank, world_size: 0 and 1 where the trace does not say.
        says_rank: whether it does.
        groups: descriptions of the rank's process groups that have several ranks.
        device_name: of the traced device, "" on a CPU.
    """

    host: list[HostEvent]
    device: list[DeviceEvent]
    device_marks: list[DeviceEvent] = field(default_factory=list)
    forward_of: Mapping[Place, Place] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    says_rank: bool = False
    groups: tuple[str, ...] = ()
    device_name: str = ""
    source: str = ""


def read_trace(path: Path) -> Trace:
    """The events of a trace file.

    Raises: DataError when it cannot be read, is no trace, or holds no event that takes time.
    """
    return parse_trace(_bytes_of(path), path)


def parse_trace(content: bytes, path: Path) -> Trace:
    """The same of a file's content; `path` is what messages call it.

    Raises: DataError when it is no trace, or holds no event that takes time.
    """
    with _no_collection():
        try:
            reader, facts = _decode(content)
            spread = facts.get("distributedInfo") or {}
            cards = facts.get("deviceProperties") or []
            rank, world_size = int(spread.get("rank", 0)), max(1, int(spread.get("world_size", 1)))
            says_rank = "rank" in spread
            groups = _groups(spread.get("pg_config"))
            name = str(cards[0].get("name", "")) if reader.device and cards else ""
        except KeyError as exc:
            raise _no_trace(path, f"it does not read as one: {exc} is missing.") from exc
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
            raise _no_trace(path, f"it does not read as one: {exc}.") from exc
    if not any(event.end > event.start for events in (reader.host, reader.device) for event in events):
        raise _no_trace(path, "it holds no operator, mark or kernel that takes time.")
    reader.host.sort(key=lambda event: (event.start, -event.end))
    reader.device.sort(key=lambda event: (event.start, event.end))
    return Trace(
        host=reader.host,
        device=reader.device,
        device_marks=reader.device_marks,
        forward_of=reader.forward_of,
        rank=rank,
        world_size=world_size,
        says_rank=says_rank,
        groups=groups,
        device_name=name,
        source=str(path),
    )


def _groups(config: object) -> tuple[str, ...]:
    """Of the process groups that a trace lists; versions of PyTorch differ in what they say of each."""
    listed = [each for each in config if isinstance(each, Mapping)] if isinstance(config, list) else []
    several = [each for each in listed if each.get("pg_size") != 1 and len(each.get("ranks") or (0, 1)) > 1]
    return tuple(str(each.get("pg_desc", "")) for each in several)


def _no_trace(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is no trace of torch.profiler.",
        why=why,
        mend="give the file that export_chrome_trace wrote (.json or .json.gz), or a run's folder.",
    )


def _bytes_of(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(
            f"cannot read {path}: {getattr(exc, 'strerror', None) or exc}.",
            why="the file is missing, not readable, or its end is cut off.",
            mend="give the file that export_chrome_trace wrote (.json or .json.gz), or a run's folder.",
        ) from exc


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of new objects and no cycle: Python's collector would walk them over and over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reader:
    """Keeps what the ledger uses of each event."""

    def __init__(self) -> None:
        self.host: list[HostEvent] = []
        self.device: list[DeviceEvent] = []
        self.device_marks: list[DeviceEvent] = []
        self._flows: dict[Any, Place] = {}
        self.forward_of: dict[Place, Place] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._names: dict[str, str] = {}

    def add(self, events: Iterable[Any]) -> None:
        """Take over a piece of the list of events."""
        for event in events:
            category = event.get("cat", "")
            if category == "fwdbwd":
                self._flow(event)
            if event.get("ph") != "X" or "dur" not in event:
                continue
            if category in HOST_CATEGORIES:
                self.host.append(self._host(event, category))
            elif category in DEVICE_CATEGORIES:
                self.device.append(self._device(event, category))
            elif category == "gpu_user_annotation":
                self.device_marks.append(self._device(event, category))
            elif category == "python_function" and str(event.get("name", "")).startswith(MODULE_CALL):
                self.host.append(self._host(event, category))

    def _flow(self, event: dict[str, Any]) -> None:
        """The profiler's arrow from a forward operator to the node that runs its backward."""
        place = self._thread(event), round(event["ts"] * 1000)
        if event["ph"] == "s":
            self._flows[event["id"]] = place
        elif event["id"] in self._flows:
            self.forward_of[place] = self._flows[event["id"]]

    def _thread(self, event: dict[str, Any]) -> int:
        return self._threads.setdefault((event.get("pid"), event.get("tid")), len(self._threads))

    def _host(self, event: dict[str, Any], category: str) -> HostEvent:
        args = event.get("args") or {}
        start, end = _times(event)
        sequence = args.get("Sequence number")
        return HostEvent(
            start,
            end,
            self._name(event),
            category,
            self._thread(event),
            int(args.get("correlation", 0)) if category in RUNTIME_CATEGORIES else 0,
            -1 if sequence is None else int(sequence),
            int(args.get("Fwd thread id") or 0) != 0,
            tuple(map(_shape, args.get("Input Dims") or ())),
            tuple(map(str, args.get("Input type") or ())),
            args if "Collective name" in args else None,
        )

    def _device(self, event: dict[str, Any], category: str) -> DeviceEvent:
        args = event.get("args") or {}
        start, end = _times(event)
        return DeviceEvent(
            start,
            end,
            self._name(event),
            category,
            _whole(args.get("stream", event.get("tid", 0))),
            _whole(args.get("correlation", 0)),
            _whole(args.get("bytes", 0)),
            args if "Collective name" in args else None,
        )

    def _name(self, event: dict[str, Any]) -> str:
        name = str(event.get("name", ""))
        return self._names.setdefault(name, name)


def _times(event: Mapping[str, Any]) -> tuple[int, int]:
    """(start, end) in nanoseconds; a clock that ran backwards leaves a negative duration, which is none."""
    start = round(event["ts"] * 1000)
    end = start + max(0, round(event["dur"] * 1000))
    if max(-start, end) > LATEST:
        raise ValueError(f"an event lasts from {start:.3g} to {end:.3g} ns")
    return start, end


def _shape(value: Any) -> list[Any]:
    """The sizes of a tensor, or of a list of them; anything else has none."""
    if not isinstance(value, list):
        return []
    known = all(isinstance(size, list) or (isinstance(size, int) and 0 <= size < LONGEST) for size in value)
    return value if known else []


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _decode(content: bytes) -> tuple[_Reader, dict[str, Any]]:
    """Every event, and what else the document says."""
    key = content.find(b'"traceEvents"')
    begin = content.find(b"[", key) + 1
    if key >= 0 and EVENT_END in content[begin : begin + PIECE_BYTES]:
        with suppress(ValueError):  # somebody else's line breaks, or a name that is no UTF-8
            return _decode_pieces(content, key, begin)
    document = _loads(content)
    if isinstance(document, list):  # the format's short form: the events alone
        document = {"traceEvents": document}
    reader = _Reader()
    reader.add(document.pop("traceEvents"))
    return reader, document


def _decode_pieces(content: bytes, key: int, at: int) -> tuple[_Reader, dict[str, Any]]:
    reader = _Reader()
    while (cut := content.rfind(EVENT_END, at, at + PIECE_BYTES)) >= 0:
        reader.add(json.loads(b"[" + content[at : cut + len(EVENT_END) - 1] + b"]", strict=False))
        at = cut + len(EVENT_END)
    tail = _loads(b'{"traceEvents": [' + content[at:])
    reader.add(tail.pop("traceEvents"))
    return reader, _loads(content[:key].rstrip().rstrip(b",") + b"}") | tail


def _loads(content: bytes) -> Any:
    return json.loads(content.decode("utf-8", errors="replace"), strict=False)
