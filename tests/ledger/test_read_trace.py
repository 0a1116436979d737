"""Trace files: the profiler's own, others' line breaks, and files that are none."""

import gzip
import json

import pytest

from redline.errors import DataError
from redline.ledger import Reference
from redline.ledger import trace as trace_room
from redline.ledger.take import take_account
from redline.ledger.trace import read_trace

from .traces import TraceFile


def some_trace() -> TraceFile:
    made = TraceFile(rank=3, world_size=8)
    for step in range(40):
        at = 1000.0 * step
        made.op("aten::mm", at, 20.5, dims=[[4, 8], [8, 2]], sequence=step)
        made.kernel('gemm<"odd \\ name">', at + 30.123, 500.001, launched=at + 2)
    return made


def test_all_ways_of_writing_it_read_the_same(tmp_path, monkeypatch) -> None:
    made = some_trace()
    plain = read_trace(made.write(tmp_path / "a.json"))
    zipped = read_trace(made.write(tmp_path / "a.json.gz"))
    (tmp_path / "b.json").write_text(json.dumps(json.loads(made.text())))
    dense = read_trace(tmp_path / "b.json")
    (tmp_path / "c.json").write_text(json.dumps(made.events))
    short = read_trace(tmp_path / "c.json")
    monkeypatch.setattr(trace_room, "PIECE_BYTES", 2000)  # many pieces
    pieces = read_trace(tmp_path / "a.json")
    for other in (zipped, dense, short, pieces):
        assert (other.host, other.device) == (plain.host, plain.device)
    assert len(plain.device) == 40 and len(plain.host) == 80
    assert (plain.rank, plain.world_size, plain.device_name) == (3, 8, "NVIDIA H200")
    assert (plain.device[0].start, plain.device[0].end) == (30_123, 530_124)  # nanoseconds


def test_a_name_that_is_no_utf8_and_control_characters_do_not_stop_it(tmp_path) -> None:
    content = some_trace().text().encode().replace(b"odd", b"o\xffd\t", 1)
    (tmp_path / "t.json").write_bytes(content)
    assert len(read_trace(tmp_path / "t.json").device) == 40


def one_event(ts: str = "1", dur: str = "5", args: str = "{}", more: str = "") -> bytes:
    event = f'"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": {ts}, "dur": {dur}'
    return f'{{{more}"traceEvents": [{{{event}, "args": {args}}}]}}'.encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no trace"),
        (b"{", "no trace"),
        (b"[1, 2]", "no trace"),
        (b'{"a": 1}', "no trace"),
        (b'{"traceEvents": 3}', "no trace"),
        (b'{"traceEvents": []}', "no operator, mark or kernel"),
        (b'{"wall_ms": 3}', "'traceEvents' is missing"),
        (one_event(dur='"x"'), "no trace"),
        (one_event(ts="1e300"), "an event lasts from"),
        (one_event(ts="1e17"), "an event lasts from"),
        (one_event(ts="1e999"), "infinity"),
        (one_event(ts="NaN"), "NaN"),
        (one_event(dur="9" * 5000), "digits"),
        (one_event(dur="0"), "that takes time"),
        (one_event(dur="-5"), "that takes time"),
        (one_event(args='{"Sequence number": 1e400}'), "infinity"),
        (one_event(args='{"Input Dims": 5}'), "not iterable"),
        (one_event(args="[1]"), "no attribute"),
        (one_event(more='"distributedInfo": {"rank": "q"}, '), "invalid literal"),
        (one_event(more='"distributedInfo": [1], '), "no attribute"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cut off"),
    ],
)
def test_what_is_no_trace_is_said_plainly(tmp_path, content, says) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert says in str(caught.value) and "mend:" in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        '{"Input Dims": [["x", 2], [2, "y"]], "Input type": ["float", "float"]}',
        '{"Input Dims": [[1e30, 2], [2, 3]], "Input type": [3, null]}',
        '{"Input Dims": ["abc", 4], "Input type": "float"}',
        '{"Input Dims": [[[2, 3], [4]], [], [2]], "Input type": ["TensorList", "", "float"]}',
        '{"Input Dims": [[-1, 1000000000000000000000], [4, 5]], "Input type": ["float", "float"]}',
    ],
)
def test_odd_shapes_cost_no_more_than_their_flops(tmp_path, args) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(one_event(args=args))
    found = take_account(read_trace(path), Reference(peak_flops_per_s=1e12))
    assert found.wall_ms == 0.005 and sum(loss.ms for loss in found.losses) + (
        found.ideal_ms or 0
    ) == pytest.approx(0.005)


def test_a_step_that_takes_no_time_is_said_plainly(tmp_path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#1",
            "pid": 1,
            "tid": 1,
            "ts": 1,
            "dur": 0,
        },
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 2, "dur": 5},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(DataError, match="no step that takes time"):
        take_account(read_trace(path), Reference())


def test_a_missing_file_is_said_plainly(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none.json")
