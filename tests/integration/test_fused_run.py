"""Whole runs of `--transformer-impl fused`, in a process of their own under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import QUICK_START, TINY, Run
from .test_resume import weights

TESTS = Path(__file__).parent.parent
MAIN = (
    f"import sys; sys.path.insert(0, {str(TESTS / 'kernels')!r})\n"
    "from mended_interpreter import mend; mend()\n"
    f"{QUICK_START}"
    "from redline.cli.main import main\n"
    "from triton.runtime.interpreter import GridExecutor\n"
    "launch, launched = GridExecutor.__call__, set()\n"
    "def call(self, *args, **named):\n"
    "    launched.add(self.fn.__module__.split('.')[2])\n"
    "    return launch(self, *args, **named)\n"
    "GridExecutor.__call__ = call\n"
    "for line in sys.stdin:\n"
    "    if code := main(line.split()): sys.exit(code)\n"
    "    print('launched:', *sorted(launched)); launched.clear()"
)
SMALLER = (
    "--seq-length 8 --vocab-size 37 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --eval-iters 1"
)
MODELS = {
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--qk-layernorm --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--hidden-dropout 0 --attention-dropout 0",
}
WHOLE = {
    "gpt": {"persist-layer-norm", "bias-gelu-fusion", "bias-dropout-fusion", "masked-softmax-fusion"},
    "llama": {"persist-layer-norm", "rope-fusion", "bias-swiglu-fusion", "bias-dropout-fusion"},
}

SWITCHED = {"norm_triton", "embedding", "adamw", "grad_norm"}


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """train(name="--more flags", ...) -> a Run of the tiny model each, one after the other in one process."""
    pytest.importorskip("triton", reason="the package triton is not installed")

    def call(**runs: str) -> list[Run]:
        lines = [f"train {TINY} {SMALLER} {flags} --save {tmp_path / name}" for name, flags in runs.items()]
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", MAIN], input="\n".join(lines), env=environment, capture_output=True,
            text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs = re.split(r"(?<=\n)(?=launched:.*\n)", done.stdout)
        return [Run(tmp_path / name, output) for name, output in zip(runs, outputs[1:], strict=True)]

    return call


def rooms(run: Run) -> set[str]:
    """The rooms and files of kernels/ that launched kernels are of, but for the probe of the interpreter."""
    return set(run.output.split("\n")[0].split()[1:]) - {"interpreter"}


def ran(run: Run) -> dict[str, str]:
    return {choice["what"]: choice["ran"] for choice in run.summary["choices"]}


@pytest.mark.parametrize("model", MODELS)
def test_a_fused_run_is_the_local_run_and_resumes_bit_for_bit(train: Any, model: str) -> None:
    """Losses to 1e-4 (fp32, another order of sums); cut at step 1 and resumed, the very same bits."""
    fused = f"{MODELS[model]} --transformer-impl fused"
    local = f"{MODELS[model]} --transformer-impl local"
    whole, local, cut = train(fused=fused, local=local, cut=f"{fused} --exit-interval 1")
    assert whole.losses == pytest.approx(local.losses, rel=1e-4)
    assert whole.valid_losses == pytest.approx(local.valid_losses, rel=1e-4)
    choices = ran(whole)
    assert choices["transformer-impl"] == "fused" and choices["adamw-fusion"] == "fused"
    assert choices["cross-entropy-loss-fusion"] == "fused"
    assert all(choices[what] == "fused" for what in WHOLE[model])
    assert rooms(whole) >= SWITCHED and not rooms(local)
    assert ran(local)["transformer-impl"] == "local" and "fused" not in ran(local).values()

    assert len(cut.losses) == 1
    (resumed,) = train(cut=f"{fused} --load {cut.folder}")
    assert resumed.losses == whole.losses
    saved, wanted = weights(resumed), weights(whole)
    assert saved.keys() == wanted.keys()
    assert all((saved[key] == wanted[key]).all() for key in wanted)


def test_switches_reach_the_run(train: Any) -> None:
    """One operator swapped into a local run, one taken out of a fused run."""
    one, out = train(
        one=f"{MODELS['llama']} --transformer-impl local --bias-swiglu-fusion",
        out=f"{MODELS['llama']} --transformer-impl fused --cross-entropy-fusion-impl native "
        "--no-persist-layer-norm --no-embedding-fusion --no-adamw-fusion --no-grad-norm-fusion",
    )
    assert {what for what, which in ran(one).items() if what.endswith("-fusion") and which == "fused"} == {
        "bias-swiglu-fusion"
    }
    assert ran(out)["adamw-fusion"] == "local" and ran(out)["rope-fusion"] == "fused"
    assert not any("optimizer" in what for what in ran(out)), "the update has one row"
    reasons = {choice["what"]: choice["why"] for choice in out.summary["choices"]}
    for switch in ("persist-layer-norm", "embedding-fusion", "adamw-fusion", "grad-norm-fusion"):
        assert ran(out)[switch] == "local" and reasons[switch] == f"switched off by --no-{switch}"
    assert reasons["cross-entropy-loss-fusion"] == "one kernel for cross entropy"
    assert rooms(one) == {"gated_triton"}
    assert rooms(out) == {"gated_triton", "cross_entropy", "bias_dropout_add", "rotary"}
    assert one.losses == pytest.approx(out.losses, rel=1e-4)


def test_the_interpreter_as_released_is_refused_at_the_start(tmp_path: Path) -> None:
    """It fails in the middle of a step, or rounds otherwise than a GPU; `auto` is the mend."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path),
    }  # fmt: skip
    words = f"train {TINY} {SMALLER} --transformer-impl fused --save {tmp_path / 'run'}".split()
    code = f"{QUICK_START}import sys\nfrom redline.cli.main import main\nsys.exit(main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ConfigError: --transformer-impl fused cannot run here." in done.stderr
    assert "Triton's interpreter, which TRITON_INTERPRET asks for" in done.stderr
    assert "mend: use --transformer-impl auto" in done.stderr and "Traceback" not in done.stderr
