"""Trace files: the profiler's own, others' line breaks, and files that are none."""

import gzip
import json

import pytest

from redline.errors import DataError
from redline.ledger import trace as trace_room
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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no trace"),
        (b"{", "no trace"),
        (b"[1, 2]", "no trace"),
        (b'{"a": 1}', "no trace"),
        (b'{"traceEvents": 3}', "no trace"),
        (b'{"traceEvents": []}', "no operator, mark or kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": "x", "ts": 1}]}', "no trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cut off"),
    ],
)
def test_what_is_no_trace_is_said_plainly(tmp_path, content, says) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert says in str(caught.value) and "mend:" in str(caught.value)


def test_a_missing_file_is_said_plainly(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none.json")
