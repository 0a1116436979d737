"""fp8 in whole runs on a GPU: each recipe near bf16, blocks near their emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.hardware import ADA, HOPPER

SMALL = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --vocab-size 509 "
    "--seq-length 128 --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --eval-iters 2 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --num-workers 0 --no-profile-ledger"
)


def need(capability: tuple[int, int], *, exactly: bool = False) -> None:
    """Skip where the card's fp8 units are older, or of another kind."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found < capability or (exactly and found[0] != capability[0]):
        pytest.skip(f"needs compute capability {capability}, not {found}")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_every_recipe_trains_near_bf16(recipe: str, train: Any) -> None:
    """Six steps from the same weights on the same samples: operands have 3 bits of mantissa."""
    need(HOPPER if recipe == "blockwise" else ADA, exactly=recipe == "blockwise")
    fp8 = "--fp8-e4m3 --fp8-recipe blockwise" if recipe == "blockwise" else f"--fp8 --fp8-recipe {recipe}"
    found, wanted = train("fp8", fp8, base=SMALL), train("bf16", base=SMALL)
    assert found.losses == pytest.approx(wanted.losses, rel=5e-3) and found.losses != wanted.losses
    assert found.valid_losses == pytest.approx(wanted.valid_losses, rel=5e-3)
    (choice,) = (choice for choice in found.summary["choices"] if choice["what"] == "fp8")
    assert choice["why"].startswith("8 of 8 GEMMs of the layers; ") and "emulated" not in choice["why"]


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["--fp8", "--fp8 --fp8-param-gather --use-distributed-optimizer"])
def test_compiled_blocks_train_as_eager_ones(flags: str, train: Any) -> None:
    """The sites run the same code inside; what lies between them is rounded otherwise."""
    need(ADA)
    found, wanted = (
        train("whole", f"{flags} --use-torch-compile", base=SMALL),
        train("eager", flags, base=SMALL),
    )
    assert found.losses == pytest.approx(wanted.losses, rel=2e-3)
    assert found.summary["compiled"]["graphs"] == 2


@pytest.mark.gpu
def test_blocks_train_as_their_emulation_does(train: Any) -> None:
    """Tensor cores sum within blocks with a few bits less than fp32."""
    need(HOPPER, exactly=True)
    flags = "--fp8-e4m3 --fp8-recipe blockwise"
    found, wanted = train("units", flags, base=SMALL), train("emulated", f"{flags} --fp8-emulate", base=SMALL)
    assert found.losses == pytest.approx(wanted.losses, rel=2e-3)  # 1.03e-3 was seen after six steps
