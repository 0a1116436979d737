"""docs/crossings.md says of every pair of features whether they run together: held against the rules."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from redline.config import InvalidConfigError, parse_args

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "crossings.md"
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
    "8-bit moments": "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    "optimizer offload": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
}


def pairs() -> dict[tuple[str, str], str]:
    """(feature, feature) -> what the page says."""
    table = {}
    for line in PAGE.read_text().splitlines():
        first, second, *said = (cell.strip() for cell in f"{line.strip().strip('|')}||".split("|")[:3])
        if {first, second} <= FEATURES.keys():
            assert (first, second) not in table, line
            table[first, second] = said[0]
    return table


def test_every_pair_has_its_line() -> None:
    assert list(pairs()) == list(itertools.combinations(FEATURES, 2))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(FEATURES, 2)))
def test_line_says_what_the_rules_do(first: str, second: str) -> None:
    """A pair called refused is refused, by the rules it names; any other is accepted, and its test exists."""
    said = pairs()[first, second]
    words = f"{BASE} {FEATURES[first]} {FEATURES[second]}".split()
    if not said.startswith("refused: "):
        path, _, name = said.strip("`").partition("::")
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), said
        parse_args(words)
        return
    with pytest.raises(InvalidConfigError) as raised:
        parse_args(words)
    rules = {problem.rule for problem in raised.value.problems}
    named = said.removeprefix("refused: ").split(", ")
    assert all(rule in rules or f"not-available-yet/{rule}" in rules for rule in named), (said, rules)
