"""`redline ledger` on traces written by hand: which are one job's, and what FLOPs each rank has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.cli import ledger
from redline.errors import UsageError

from ..ledger.traces import TraceFile

MODEL = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 97 "
    "--seq-length 16 --global-batch-size 8"
)


def a_trace(path: Path, *, says: tuple[int, int] | None, wall: float = 1000) -> Path:
    """One step of one product; `says` is its rank and world size, None for a trace that does not tell."""
    rank, world_size = says or (0, 1)
    made = TraceFile(rank=rank, world_size=world_size)
    if says is None:
        del made.head["distributedInfo"]
    made.mark("ProfilerStep#5", 0, wall)
    made.op("aten::mm", 0, 10, dims=[[1024, 1024], [1024, 1024]])
    made.kernel("nvjet_tst_128x256", 10, 500, launched=2)
    return made.write(path)


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """document(word, ...) -> what `redline ledger word ... --json` prints."""

    def call(*words: object) -> dict[str, Any]:
        assert ledger.main([*map(str, words), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ([None], 1),
        ([None, None], 2),
        ([(0, 2), (1, 2)], 2),
        ([(0, 8), (1, 8)], 8),  # traces of some ranks
        ([(0, 1), None], 2),
    ],
)
def test_a_rank_has_its_part_of_the_models_flops(tmp_path, document, said, ranks) -> None:
    """Traces that do not say how many ranks the job had have as many as there are traces."""
    paths = [a_trace(tmp_path / f"r{index}.json", says=each) for index, each in enumerate(said)]
    found = document(*paths, *MODEL.split())
    one = document(a_trace(tmp_path / "one.json", says=(0, 1)), *MODEL.split())["reference"]
    assert [each["rank"] for each in found["ranks"]] == list(range(len(said)))
    assert found["reference"]["model_flops"] == one["model_flops"] / ranks
    assert found["reference"]["attention_flops"] == one["attention_flops"] / ranks


def test_of_a_folder_the_newest_cycle_of_each_process_counts(tmp_path, document) -> None:
    """As tensorboard_trace_handler names them: the process, then the time, which may gain a digit."""
    for process, rank in (("node.a_11", 0), ("node.a_12", 1)):
        for index, time in enumerate((999, 1000, 998)):
            a_trace(tmp_path / f"{process}.{time}.pt.trace.json", says=(rank, 2), wall=1000 * (index + 1))
    found = document(tmp_path)
    assert [Path(each["source"]).name.split(".pt")[0] for each in found["ranks"]] == [
        "node.a_11.1000",
        "node.a_12.1000",
    ]
    assert [each["rank"] for each in found["ranks"]] == [0, 1] and found["wall_ms"] == 2


def test_two_cycles_of_one_process_are_one_rank(tmp_path, document) -> None:
    for time in (5, 6):
        a_trace(tmp_path / f"host_1.{time}.pt.trace.json", says=None, wall=100.0 * time)
    found = document(tmp_path)
    assert len(found["ranks"]) == 1 and found["spread"] == [] and found["wall_ms"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("names", "says", "whose"),
    [
        (("host_1.5", "host_2.6"), (0, 1), "rank 0"),  # two runs
        (("host_1.5", "host_1.6"), (3, 8), "rank 3"),
        (("host_1.5", "host_1.6"), None, "process .*host_1"),
    ],
)
def test_two_traces_of_one_rank_are_refused(tmp_path, names, says, whose) -> None:
    paths = [a_trace(tmp_path / f"{name}.pt.trace.json", says=says) for name in names]
    with pytest.raises(UsageError, match=f"{names[0]}.* and .*{names[1]}.* are both of {whose}\\.") as error:
        ledger.main([str(path) for path in paths])
    assert error.value.why and error.value.mend


def test_a_folder_of_two_runs_is_refused(tmp_path) -> None:
    for process in (1, 2):
        a_trace(tmp_path / f"host_{process}.5.pt.trace.json", says=(0, 1))
    with pytest.raises(UsageError, match=r"host_1.* and .*host_2.* are both of rank 0"):
        ledger.main([str(tmp_path)])
