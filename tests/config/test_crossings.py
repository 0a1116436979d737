"""docs/crossings.md says of every pair of features whether they run together: held against the rules."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from redline.config import InvalidConfigError, parse_args

PAGE = Path(__file__).parents[2] / "docs" / "crossings.md"
BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --mock-data --train-iters 2"
FEATURES = {
    "compile": "--use-torch-compile",
    "graph": "--cuda-graph-impl local",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "fp8": "--fp8-format hybrid",
    "packing": "--dataloader-inter-document-masking",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "tp": "--tensor-model-parallel-size 2",
    "sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "distributed optimizer": "--use-distributed-optimizer",
    "pp": "--pipeline-model-parallel-size 2",
    "cp": "--context-parallel-size 2",
    "mtp": "--mtp-num-layers 1",
}


def cells() -> dict[tuple[str, str], str]:
    """(feature, feature) -> what the page says."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    names = [cell.strip() for cell in rows[0].strip("|").split("|")][1:]
    table = {}
    for row in rows[1 : 1 + len(names)]:
        first, *values = (cell.strip() for cell in row.strip("|").split("|"))
        table |= {(first, second): value for second, value in zip(names, values, strict=True)}
    return table


def test_no_cell_is_empty() -> None:
    table = cells()
    for first, second in itertools.combinations(FEATURES, 2):
        assert table[first, second] or table[second, first], (first, second)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(FEATURES, 2)))
def test_cell_says_what_the_rules_do(first: str, second: str) -> None:
    """A pair that the page calls refused is refused, by the rules of its parts that it names."""
    table = cells()
    said = table[first, second] or table[second, first]
    words = f"{BASE} {FEATURES[first]} {FEATURES[second]}".split()
    with pytest.raises(InvalidConfigError) as raised:
        parse_args(words)
    rules = {problem.rule for problem in raised.value.problems}
    named = {
        f"not-available-yet/{topic}" for topic in said.removeprefix("refused:").replace(",", " ").split()
    }
    assert said.startswith("refused:") and named <= rules, (said, rules)
