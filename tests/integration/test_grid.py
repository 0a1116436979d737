"""Every layout of up to eight ranks trains as one process does: ten steps in float64, to 1e-10.

The grid is whole: tensor-parallel size, sequence parallelism, distributed optimizer, overlap, and one or two
microbatches a rank. The data-parallel size is what is left of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.config import Environment
from redline.run import open_run

from .ranks import merged, on_ranks
from .test_data_parallel import BASE, SMALL, finished, on_one
from .tiny import parsed

SWITCH = (False, True)


def layouts(world_size: int, tp: int) -> Iterator[dict[str, Any]]:
    """The options of every layout with that tensor-parallel size."""
    dp = world_size // tp
    for sp, sharded, overlap, microbatches in itertools.product(SWITCH, SWITCH, SWITCH, (1, 2)):
        if (sp and tp == 1) or (dp == 1 and (sharded or overlap)):
            continue
        values = {"tensor_model_parallel_size": tp, "sequence_parallel": sp, **SMALL}
        values |= {"use_distributed_optimizer": sharded, "global_batch_size": dp * microbatches}
        if dp > 1:
            values["overlap_grad_reduce"] = overlap
        if sharded:
            values["overlap_param_gather"] = overlap
        if tp > 1 and sp:
            values["tp_comm_overlap"] = overlap
        yield values


def check_layouts(world_size: int, variants: list[dict[str, Any]], cache: Path) -> None:
    def work(environment: Environment) -> list[dict[str, Any]]:
        found = []
        for number, values in enumerate(variants):
            run = open_run(parsed({**BASE, **values}), replace(environment, attempt=number), lambda _: None)
            found.append(finished(run))
            run.close()
        return found

    alone: dict[int, dict[str, Any]] = {}
    for values, *ranks in zip(variants, *on_ranks(world_size, work), strict=True):
        size = values["global_batch_size"]
        if size not in alone:
            alone[size] = on_one({"global_batch_size": size}, cache)
        for rank in ranks:
            for what in ("losses", "norms", "params_norm"):
                assert rank[what] == pytest.approx(alone[size][what], rel=1e-10), (what, values)
            assert rank["tokens"] == alone[size]["tokens"]
        state = merged([rank["state"] for rank in ranks])
        assert state.keys() == alone[size]["state"].keys()
        for name, tensor in alone[size]["state"].items():
            torch.testing.assert_close(
                state[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, v=values, n=name: f"{v}: {n}: {m}"
            )


CORNERS = [
    {**SMALL, "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
     "tp_comm_overlap": True, "global_batch_size": 4},
]  # fmt: skip


def test_everything_at_once_on_four_ranks(tmp_path: Path) -> None:
    """Both axes, everything sharded and overlapped, two microbatches a rank."""
    check_layouts(4, CORNERS, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)]
)
def test_every_layout(world_size: int, tp: int, tmp_path: Path) -> None:
    check_layouts(world_size, list(layouts(world_size, tp)), tmp_path)
