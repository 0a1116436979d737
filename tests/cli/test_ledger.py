"""`redline ledger` on traces written by hand: which are one job's, and what FLOPs each rank has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.cli import ledger

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
