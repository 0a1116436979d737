"""In fp32 the losses and gradients of the first step are those of one process to 1e-6, for every layout.

Later steps differ more: Adam turns the sign of a rounding error into a whole step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .layouts import LLAMA, Array, Seen, train_all

# Nothing is clipped, so that the first moment after the first step is (1 - beta1) times the gradient.
# The model has no biases: the gradient of a bias of keys is nothing but rounding.
MODEL = {
    **LLAMA, "fp64": False, "fp32": True, "train_iters": 1, "global_batch_size": 8, "clip_grad": 0.0
}  # fmt: skip
DP = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
TP = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "dp": {**DP, "use_distributed_optimizer": False},
    "dp, sharded": {**DP, "use_distributed_optimizer": True},
    "tp": TP,
    "tp, sp": {**TP, "sequence_parallel": True},
}
TOLERANCE = 1e-6  # of the largest gradient of a tensor: some eight roundings of fp32


def first_moments(seen: Seen) -> dict[str, tuple[tuple[int, ...], Array]]:
    return {name: piece for name, piece in seen.pieces.items() if "exp_avg" in name and "_sq" not in name}


def test_fp32_losses_and_first_gradients(tmp_path: Path) -> None:
    ((alone,),) = train_all(1, [MODEL], tmp_path)
    whole = first_moments(alone)
    found = train_all(2, [{**MODEL, **layout} for layout in LAYOUTS.values()], tmp_path)
    for name, ranks in zip(LAYOUTS, found, strict=True):
        covered = {tensor: np.zeros(held.shape, bool) for tensor, (_, held) in whole.items()}
        for rank in ranks:
            assert rank.losses == pytest.approx(alone.losses, rel=TOLERANCE), name
            assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=TOLERANCE), name
            for tensor, (offset, piece) in first_moments(rank).items():
                box = tuple(slice(low, low + size) for low, size in zip(offset, piece.shape, strict=True))
                covered[tensor][box] = True
                largest = np.abs(whole[tensor][1]).max()
                assert largest > 0
                off = np.abs(piece - whole[tensor][1][box]).max()
                assert off <= TOLERANCE * largest, f"{name}: {tensor} is off by {off / largest:.1e}"
        assert covered and all(each.all() for each in covered.values()), f"{name}: a gradient is missing"
