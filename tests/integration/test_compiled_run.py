"""Whole runs of `--use-torch-compile`: the losses of eager ones, resumed bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.build import compile

from .conftest import TINY
from .test_resume import weights

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def test_a_compiled_run_is_the_eager_run_and_resumes_bit_for_bit(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, two microbatches a step and evaluations. The captured operators run one by one."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    flags = "--eval-interval 2 --use-torch-compile"
    eager, whole = train("eager", "--eval-interval 2"), train("whole", f"{flags} --save-interval 3")
    assert whole.losses == eager.losses and whole.valid_losses == eager.valid_losses
    assert whole.summary["compiled"]["graphs"] == 2, "one to train, one to evaluate"
    assert eager.summary["compiled"] is None
    assert "graph 1, for training" in whole.output and "graph 2, for evaluation" in whole.output
    torch._dynamo.reset()  # as in a new process
    resumed = train("resumed", f"{flags} --load {whole.folder} --ckpt-step 3")
    assert resumed.losses == whole.losses[3:]
    saved, wanted = weights(resumed), weights(whole)
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


def test_whole_compiled_layers_are_recomputed(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph more: the forward that is dropped records nothing, and draws dropout."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    eager, again = train("eager"), train("again", f"--use-torch-compile {full}")
    assert again.losses == eager.losses and again.valid_losses == eager.valid_losses
    assert again.summary["compiled"]["graphs"] == 3
    saved, wanted = weights(again), weights(eager)
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


def test_attention_of_pytorch_is_kept_and_that_is_said(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout a CPU takes PyTorch's flash kernel, which a compiled block does not repeat."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    flags = "--attention-dropout 0 --train-iters 2 --eval-iters 0 --use-torch-compile"
    run = train("kept", f"{flags} --recompute-activations --recompute-modules core_attn layernorm")
    choices = {choice["what"]: choice for choice in run.summary["choices"]}
    assert choices["recompute-core-attn"]["ran"] == "kept"
    assert choices["recompute"]["ran"] == "layernorm"


def dropping(modules: str) -> str:
    return f"--recompute-activations --recompute-modules {modules}" if modules else ""


FP8_RUNS = {
    "delayed": "--hidden-size 32 --fp8 --fp8-amax-history-len 4",
    "tensorwise": "--hidden-size 32 --fp8 --fp8-recipe tensorwise "
    "--fp8-param-gather --use-distributed-optimizer",
    "blockwise": "--fp8-e4m3 --fp8-recipe blockwise --hidden-size 128 --ffn-hidden-size 128",
    "no wgrad": f"--hidden-size 32 --fp8 --no-fp8-wgrad --no-parameter-transpose-cache {LLAMA} "
    "--activation-func-clamp-value 0.05 --glu-linear-offset 1",
}


SHORT = {("delayed", "core_attn layernorm activation"), ("tensorwise", "mlp")}


@pytest.mark.parametrize(
    ("recipe", "modules"),
    [
        pytest.param(name, modules, marks=[] if (name, modules) in SHORT else pytest.mark.long)
        for name in FP8_RUNS
        for modules in ("", "core_attn layernorm activation", "mlp")
    ],
)
def test_compiled_fp8_is_eager_fp8(
    recipe: str, modules: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the step that measures, one whose losses are counted, and evaluations: one graph to train.

    With these modules dropped, the bits of eager sites that drop nothing.
    """
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    flags = f"{FP8_RUNS[recipe]} --eval-interval 2 --fp8-stats-interval 3"
    eager, whole = train("eager", flags), train("whole", f"{flags} {dropping(modules)} --use-torch-compile")
    assert whole.losses == eager.losses and whole.valid_losses == eager.valid_losses
    assert whole.summary["compiled"]["graphs"] == 2, "one to train, one to evaluate"
    saved, wanted = weights(whole), weights(eager)
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


def test_b045_sixty_compiled_steps_in_fp8(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whole layers recomputed: the bits of eager code, so finite where that is."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"{LLAMA} --hidden-size 32 --fp8 --train-iters 60 --eval-iters 0 --lr 3e-3"
    eager, whole = train("eager", flags), train("whole", f"{flags} {full} --use-torch-compile")
    assert whole.losses == eager.losses and all(loss < 10 for loss in whole.losses)


def test_compiled_code_trains_and_is_kept(train: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own compiler, on any machine with a C++ compiler; fp32 sums in another order, 6 steps.

    A second run takes the code from Redline's cache and gives the same bits.
    """
    if reason := compile.why_not("cpu"):
        pytest.skip(reason)
    monkeypatch.delenv(compile.CACHE_VARIABLE, raising=False)
    flags = f"{LLAMA} --num-layers 2 --eval-iters 0"
    eager, first = train("eager", flags), train("first", f"{flags} --use-torch-compile")
    assert first.losses == pytest.approx(eager.losses, rel=1e-5)
    kept = list((tmp_path / "cache" / "redline" / "compiled").rglob("*.so"))
    assert kept, "the compiled code lies in Redline's cache"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    second = train("second", f"{flags} --use-torch-compile")
    assert second.losses == first.losses
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 2, "forward and backward"


def test_a_failing_compiler_ends_the_run(redline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[object]) -> None:
        raise ValueError("no code for this graph")

    monkeypatch.setattr(compile, "announced", lambda *_: broken)
    code, _, err = redline(f"train {TINY} --use-torch-compile --save run")
    assert code == 1
    assert "TrainingError: --use-torch-compile: a block could not be compiled." in err
    assert "ValueError: no code for this graph." in err and "mend: leave --use-torch-compile out" in err
