"""The same run under several layouts: what every rank holds, beside one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from redline.comm import close_world
from redline.comm.chunked import Chunked
from redline.config import Environment
from redline.run import OpenRun, open_run

from .ranks import on_ranks
from .tiny import parsed, take_steps, valid_loss

Values = Mapping[str, Any]
Array = npt.NDArray[Any]

BASE: dict[str, Any] = {
    "fp64": True,
    "make_vocab_size_divisible_by": 2,
    "micro_batch_size": 1,
    "train_iters": 10,
    "eval_iters": 1,
    "lr": 3e-3,
}
GPT = {**BASE, "hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {
    **BASE, "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "swiglu",
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "group_query_attention": True,
    "num_query_groups": 2, "activation_func_clamp_value": 0.05, "glu_linear_offset": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one rank found in every step, and the pieces of every tensor that it holds at the end."""

    losses: list[float]
    grad_norms: list[float]
    valid: float
    pieces: dict[str, tuple[tuple[int, ...], Array]]


def train(values: Values, environment: Environment) -> Seen:
    run = open_run(parsed(values), environment, lambda _: None)
    steps = take_steps(run)
    return Seen(
        [step.loss for step in steps], [step.result.grad_norm for step in steps], valid_loss(run).loss,
        pieces(run),
    )  # fmt: skip


def pieces(run: OpenRun) -> dict[str, tuple[tuple[int, ...], Array]]:
    """(offset, values) of each saved tensor."""
    found = {}
    for name, tensor in run.state.tensors().items():
        held = tensor.pieces if isinstance(tensor, Chunked) else {torch.Size([0] * tensor.dim()): tensor}
        for offset, piece in held.items():
            found[name] = (tuple(offset), piece.detach().cpu().numpy().copy())
    return found


def train_all(world_size: int, variants: Sequence[Values], cache: Path) -> list[list[Seen]]:
    """One fork for all variants: of each, what every rank saw."""
    if world_size == 1:
        return [[train(values, Environment(cache_dir=cache, omp_num_threads=1))] for values in variants]

    def work(environment: Environment) -> list[Seen]:
        seen = []
        for number, values in enumerate(variants):
            at = replace(environment, cache_dir=cache, attempt=number)
            seen.append(train(values, at))
            close_world()
        return seen

    by_rank = on_ranks(world_size, work)
    return [[rank[number] for rank in by_rank] for number in range(len(variants))]


def assert_equal(seen: Sequence[Seen], one: Seen, tolerance: float = 1e-10) -> None:
    """Losses, norms and every piece of every tensor are those of one process."""
    for rank, each in enumerate(seen):
        for name in ("losses", "grad_norms", "valid"):
            np.testing.assert_allclose(
                getattr(each, name), getattr(one, name), rtol=tolerance, err_msg=f"{name} of rank {rank}"
            )
        for name, (offset, piece) in each.pieces.items():
            box = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
            np.testing.assert_allclose(
                piece,
                one.pieces[name][1][box],
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"{name} of rank {rank}",
            )
    _assert_one_value_everywhere(seen)
    covered = {name: set[tuple[int, ...]]() for name in one.pieces}
    sizes = dict.fromkeys(one.pieces, 0)
    for each in seen:
        for name, (offset, piece) in each.pieces.items():
            if offset not in covered[name]:
                covered[name].add(offset)
                sizes[name] += piece.size
    assert sizes == {name: whole.size for name, (_, whole) in one.pieces.items()}, "a piece is missing"


def _assert_one_value_everywhere(seen: Sequence[Seen]) -> None:
    """B053: what several ranks hold is the same on all of them, bit for bit."""
    first: dict[tuple[str, tuple[int, ...]], Array] = {}
    for each in seen:
        assert each.losses == seen[0].losses and each.grad_norms == seen[0].grad_norms
        for name, (offset, piece) in each.pieces.items():
            assert np.array_equal(piece, first.setdefault((name, offset), piece)), name
