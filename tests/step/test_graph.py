"""A microbatch as a CUDA graph: the bits of the eager run, whatever differs between microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli.main import main
from redline.comm.chunked import Chunked
from redline.config import Environment, parse_args
from redline.errors import TrainingError
from redline.run import open_run

MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 2 --vocab-size 509 "
    "--seq-length 128 --mock-data --micro-batch-size 2 --global-batch-size 6 --train-iters 6 --eval-iters 1 "
    "--lr 1e-3 --num-workers 0 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --deterministic-mode"
)
CASES = {
    "fused": "--transformer-impl fused --bf16 --hidden-dropout 0.1 --attention-dropout 0 --z-loss 0.01",
    "local": "--transformer-impl local --bf16 --hidden-dropout 0.1 --attention-dropout 0",
    "dropout in attention": "--transformer-impl local --bf16 --attention-dropout 0.1 --hidden-dropout 0",
    "loss scale": "--transformer-impl fused --fp16 --initial-loss-scale 1024 --loss-scale-window 2 "
    "--attention-dropout 0",
    "packing": "--transformer-impl fused --bf16 --packing --hidden-dropout 0.1 --attention-dropout 0",
    "compile": "--transformer-impl fused --bf16 --use-torch-compile --hidden-dropout 0.1 "
    "--attention-dropout 0",
    "compile and recompute": "--transformer-impl fused --bf16 --use-torch-compile --hidden-dropout 0.1 "
    "--attention-dropout 0 --recompute-activations --recompute-modules layernorm activation mlp",
    "8-bit moments in host memory": "--transformer-impl fused --bf16 --attention-dropout 0 "
    "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --optimizer-cpu-offload",
    "compile and packing": "--transformer-impl local --bf16 --use-torch-compile --packing "
    "--attention-dropout 0 --hidden-dropout 0",
}


def steps(flags: str, cache: Path) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses of a whole run, its tensors at the end, and what it said."""
    said: list[str] = []
    words = f"{MODEL} {flags} --device cuda".split()
    run = open_run(parse_args(words), Environment(cache_dir=cache), lambda line: said.append(str(line)))
    step, batches = run.make_step(), run.batches()
    try:
        outcomes = [step(next(batches)) for _ in range(run.plan.batch.total_iterations)]
        losses = [outcome.loss + 10 * (outcome.z_loss or 0.0) for outcome in outcomes]
    finally:
        batches.close()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in run.state.tensors().items():  # of states in host memory: their pieces
        parts = tensor.pieces if isinstance(tensor, Chunked) else {"": tensor}
        tensors |= {f"{name} {offset}": part.cpu() for offset, part in parts.items()}
    return losses, tensors, said


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_bits_of_eager(case: str, tmp_path: Path) -> None:
    """Three microbatches a step, other data and dropout keys in each, other weights of the loss."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch._dynamo.reset()
    eager, wanted, _ = steps(CASES[case], tmp_path)
    graph, found, said = steps(f"{CASES[case]} --cuda-graph --cuda-graph-warmup-steps 2", tmp_path)
    assert any("recorded as a CUDA graph" in line for line in said), "the graph was made"
    assert len(set(eager)) == len(eager), "every step differs from the others"
    assert graph == eager
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.gpu
def test_another_size_is_an_error_not_an_eager_run(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    words = f"{MODEL} {CASES['fused']} --cuda-graph --device cuda".split()
    run = open_run(parse_args(words), Environment(cache_dir=tmp_path), lambda _: None)
    step = run.make_step()
    step([run.splits.train.batch(0, 2)])
    with pytest.raises(TrainingError, match="--cuda-graph-impl local"):
        step([run.splits.train.batch(2, 1)])


@pytest.mark.parametrize("flag", ["--cuda-graph", "--enable-cuda-graph", "--cuda-graph-impl local"])
def test_a_cpu_refuses_with_the_reason(flag: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"train {MODEL} {flag} --device cpu".split()) == 2
    err = capsys.readouterr().err
    assert "--cuda-graph-impl local cannot be done on a CPU" in err
    assert "rule: graphs-of-a-gpu" in err and "mend:" in err
