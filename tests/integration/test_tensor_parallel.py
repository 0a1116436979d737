"""Tensor and sequence parallelism change no number: losses, norms and parameters are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from .layouts import GPT, LLAMA, assert_equal, train_all

MODELS = {"gpt": GPT, "llama": LLAMA}


def tp(size: int, **given: object) -> dict[str, object]:
    return {"tensor_model_parallel_size": size, **given}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory):
    """What one process sees of a model, trained once."""
    cache, seen = tmp_path_factory.mktemp("cache"), {}

    def ask(values):
        key = repr(sorted(values.items()))
        if key not in seen:
            seen[key] = train_all(1, [values], cache)[0][0]
        return seen[key]

    return ask


def check(one, tmp_path: Path, world_size: int, variants) -> None:
    """Each (model, layout) beside the model on one process."""
    seen = train_all(world_size, [{**model, **layout} for model, layout in variants], tmp_path)
    for each, (model, _) in zip(seen, variants, strict=True):
        assert_equal(each, one(model))


def test_two_ranks(one, tmp_path: Path) -> None:
    """GPT (dropout, biases, LayerNorm, tied) and Llama (GQA, SwiGLU, RMSNorm, untied), accumulating."""
    check(
        one,
        tmp_path,
        2,
        [
            (GPT, tp(2)),
            (GPT, tp(2, sequence_parallel=True)),
            (LLAMA, tp(2)),
            (LLAMA, tp(2, sequence_parallel=True)),
        ],
    )
