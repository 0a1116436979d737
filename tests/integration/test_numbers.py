"""What training computes does not depend on how a step is cut, on saving, or on evaluating."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from redline.attention import MaskSpec
from redline.build.determinism import determinism
from redline.data import IndexedWriter
from redline.errors import TrainingError
from redline.model import logical_tensors
from redline.optim import Optimizer
from redline.run import OpenRun
from redline.step import train_step

from .conftest import TINY, Run
from .observe import digest
from .tiny import opened, take_steps, valid_loss

LLAMA = {
    "activation_func": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MICRO_BATCHES = (1, 2, 4)
# Sums of other lengths, in another order: a few roundings in each of some hundred terms.
FP32, FP64 = 1e-6, 1e-10
# Softmax does not see a bias that all keys share: its gradient is rounding alone, a signal to Adam.
DEAD = "attention.k.bias"


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, Any]:
    """Options for data whose samples differ in how many tokens count: masked ends of documents, padding."""
    generator = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "data" / "uneven", np.dtype(np.int32)) as writer:
        for number in range(80):
            text = generator.integers(0, 100, int(generator.integers(2, 30)))
            writer.add_document([*text, 100, *[-1] * (number % 5 * 6)])
    return {
        "mock_data": False,
        "data_path": (str(tmp_path / "data" / "uneven"),),
        "split": "80,20,0",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 100,
        "eod_mask_loss": True,
    }


def gradients(run: OpenRun) -> dict[str, Tensor]:
    """Copies of the gradients of the last step, by logical tensor."""
    found: dict[str, Tensor] = {}
    for name, grad in run.state.optimizer.buffers.views("main_grad").items():
        found |= logical_tensors(name, grad.clone(), run.plan.shape)
    return found


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a logical tensor, in the Euclidean norm."""
    assert found.keys() == wanted.keys()
    compared = [name for name in wanted if not name.endswith(DEAD)]
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in compared)


# ---- B113: the micro-batch size


def test_micro_batch_size_changes_nothing_in_fp32(tmp_path: Path, uneven: dict[str, Any]) -> None:
    """B113: loss, gradients and validation loss of 4 samples of unequal token counts, cut into 4, 2 and 1."""
    seen = []
    for size in MICRO_BATCHES:
        run = opened(tmp_path, {**uneven, **NO_DROPOUT, "micro_batch_size": size})
        counts = [int(batch.loss_mask_BS.sum()) for batch in next(run.batches())]
        assert len(counts) == 4 // size and (size == 4 or len(set(counts)) > 1)
        (step,) = take_steps(run, 1)
        seen.append((step.loss, gradients(run), valid_loss(run)))
    loss, grads, valid = seen[-1]
    assert valid.num_tokens > 0
    for other_loss, other_grads, other_valid in seen[:-1]:
        assert other_loss == pytest.approx(loss, rel=FP32)
        assert distance(other_grads, grads) < FP32
        assert other_valid.num_tokens == valid.num_tokens
        assert other_valid.loss == pytest.approx(valid.loss, rel=FP32)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt", "llama"])
def test_micro_batch_size_changes_nothing_in_fp64(
    tmp_path: Path, uneven: dict[str, Any], model: dict[str, Any], dropout: float
) -> None:
    """B113: after 5 steps; with dropout the masks too are those of the samples, however they are grouped."""
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    seen = []
    for size in MICRO_BATCHES:
        run = opened(tmp_path, {**uneven, **model, **drops, "fp64": True, "micro_batch_size": size})
        losses = [step.loss for step in take_steps(run, 5)]
        seen.append(([*losses, valid_loss(run).loss], run.state.tensors()))
    for losses, tensors in seen[:-1]:
        assert losses == pytest.approx(seen[-1][0], rel=FP64)
        assert distance(tensors, seen[-1][1]) < FP64
    if dropout:
        plain = opened(tmp_path, {**uneven, **model, **NO_DROPOUT, "fp64": True})
        assert take_steps(plain, 1)[0].loss != pytest.approx(seen[0][0][0], rel=FP64)


def test_wgrad_in_the_gemm_or_after_it(tmp_path: Path) -> None:
    """--gradient-accumulation-fusion is a matter of speed: in fp64 the same numbers to rounding."""
    fused, plain = (
        opened(tmp_path, {"fp64": True, "micro_batch_size": 1, "gradient_accumulation_fusion": fusion})
        for fusion in (True, False)
    )
    losses = [[step.loss for step in take_steps(run)] for run in (fused, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=FP64)
    assert distance(fused.state.tensors(), plain.state.tensors()) < FP64


# ---- B114: NaN and Inf


BAD = "layers.1.mlp.fc1.weight"


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """poison(5): the fifth step finds one NaN in the gradient of one matrix."""

    def at(step: int) -> None:
        original, calls = Optimizer.step, []

        def poisoned(self: Optimizer, *args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == step:
                self.buffers.views("main_grad")[BAD][3, 5] = math.nan
            return original(self, *args, **options)

        monkeypatch.setattr(Optimizer, "step", poisoned)

    return at


def checkpoint(run: Run, step: int) -> dict[str, Tensor]:
    """The tensors of one checkpoint, as a new run would load them."""
    return _loaded(run.folder / "checkpoints" / f"iter_{step:07d}")


def _loaded(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


EVERY_STEP = "--save-interval 1 --keep-checkpoints 10"


@pytest.mark.parametrize("precision", ["--fp32", "--bf16", "--fp16 --loss-scale 1024"])
def test_a_step_with_nan_is_skipped(train: Any, poison: Any, precision: str) -> None:
    """B114: weights and moments keep their bits, the count is 1, the log names the tensor; on it goes."""
    poison(5)
    run = train(
        "run", f"{precision} --nonfinite-action skip --train-iters 8 --lr-decay-style cosine {EVERY_STEP}"
    )
    records = run.records()
    assert [record["skipped"] for record in records] == [False] * 4 + [True] + [False] * 3
    assert BAD in records[4]["nonfinite"] and "step 5 skipped: " in run.output and BAD in run.output
    assert (run.summary["nonfinite_steps"], run.summary["skipped_steps"]) == (1, 1)
    before, skipped, after = (checkpoint(run, step) for step in (4, 5, 6))
    assert before.keys() == skipped.keys() and len(before) > 50
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert not any(torch.equal(skipped[name], after[name]) for name in after if name.endswith(".weight"))
    # A skipped step moves the data on, and not the schedule.
    assert [record["consumed_samples"] for record in records] == [4 * step for step in range(1, 9)]
    assert records[5]["lr"] == records[4]["lr"] != records[6]["lr"]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_a_step_with_nan_stops_the_run(train: Any, redline: Any, poison: Any, tmp_path: Path) -> None:
    """B114: exit code 1 and the tensor's name; what was saved before, resumed, is the unbroken run."""
    whole = train("whole", EVERY_STEP)
    poison(5)
    code, out, err = redline(f"train {TINY} {EVERY_STEP} --save {tmp_path / 'broken'}")
    assert code == 1 and BAD in err and "Traceback" not in err + out
    assert "--nonfinite-action skip" in err
    broken = Run(tmp_path / "broken", out)
    assert len(broken.losses) == 4
    assert not (broken.folder / "checkpoints" / "iter_0000005").exists()
    assert digest(checkpoint(broken, 4)) == digest(checkpoint(whole, 4))
    resumed = train("broken", f"{EVERY_STEP} --load {broken.folder}")
    assert resumed.losses == whole.losses


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_loss_that_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """B114: a NaN loss is found though the step after it would be finite, and said to be the loss."""
    run = opened(tmp_path, {"nonfinite_action": action})
    take_steps(run, 2)
    before = digest(run.state.tensors())
    original = train_step.microbatch_loss
    monkeypatch.setattr(train_step, "microbatch_loss", lambda *args: original(*args) + math.nan)
    if action == "stop":
        with pytest.raises(TrainingError, match="the loss is nan"):
            take_steps(run, 1)
    else:
        (step,) = take_steps(run, 1)
        assert (
            math.isnan(step.loss)
            and not step.result.applied
            and "the loss is nan" in str(step.result.nonfinite)
        )
        assert run.state.nonfinite_steps == 1
    assert digest(run.state.tensors()) == before


# ---- B118, B026: determinism


def trained(tmp_path: Path, values: dict[str, Any]) -> tuple[list[float], str, OpenRun]:
    run = opened(tmp_path, {"train_iters": 20, **values})
    try:
        return [step.loss for step in take_steps(run)], digest(run.state.tensors()), run
    finally:
        torch.use_deterministic_algorithms(False)


def determinism_of(run: OpenRun) -> Any:
    (choice,) = [choice for choice in run.choices if choice.what == "determinism"]
    return choice


@pytest.mark.parametrize("values", [{}, {**LLAMA, **NO_DROPOUT, "bf16": True}], ids=["gpt", "llama-bf16"])
def test_deterministic_mode_twice(tmp_path: Path, values: dict[str, Any]) -> None:
    """B118: 20 steps, losses and weights bitwise equal; the run says so, and with which attention."""
    first, second = (trained(tmp_path, {**values, "deterministic_mode": True}) for _ in range(2))
    assert first[:2] == second[:2] and len(first[0]) == 20
    assert determinism_of(first[2]).ran == "on"
    off = trained(tmp_path, values)
    assert determinism_of(off[2]).asked == "off" and determinism_of(off[2]).why


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_what_varies_on_a_gpu_is_named(backend: str) -> None:
    """B118: without the mode, operators that add in any order; B026: with it, the attention that obeys."""
    off, on = (determinism(deterministic, "cuda", backend) for deterministic in (False, True))
    assert (off.ran, on.ran) == ("off", "on")
    assert "embedding" in off.why and ("attention" in off.why) == (backend != "unfused")
    assert f"deterministic backward of {backend} attention" in on.why


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("backend", ["flash", "unfused"])
def test_deterministic_mode_twice_on_a_gpu(tmp_path: Path, backend: str, groups: int) -> None:
    """B118, B026: the same with kernels that would add in any order, grouped queries among them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    values = {
        **LLAMA, **NO_DROPOUT, "bf16": True, "device": "cuda", "seq_length": 512, "kv_channels": 64,
        "num_query_groups": groups, "attention_backend": backend, "deterministic_mode": True,
    }  # fmt: skip
    runs = [trained(tmp_path, values) for _ in range(4)]
    assert all(run[:2] == runs[0][:2] for run in runs)
    assert backend in determinism_of(runs[0][2]).why
    off = {**values, "deterministic_mode": False, "transformer_impl": "local"}
    off = determinism_of(trained(tmp_path, off)[2])
    assert off.ran == "off" and "atomic" in off.why and ("flash" in off.why) == (backend == "flash")


# ---- evaluation, ties, precision


def test_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    """Gradients, parameters, moments, counters, PyTorch's generator and the next step are as without it."""
    with_it, without = (opened(tmp_path) for _ in range(2))
    for run in (with_it, without):
        take_steps(run, 2)
    before = digest({**with_it.state.tensors(), **gradients(with_it)}), with_it.state.values()
    generator = torch.get_rng_state()
    first, second = valid_loss(with_it), valid_loss(with_it)
    assert first == second and math.isfinite(first.loss)
    assert (digest({**with_it.state.tensors(), **gradients(with_it)}), with_it.state.values()) == before
    assert torch.equal(generator, torch.get_rng_state())
    assert [step.loss for step in take_steps(with_it, 2)] == [step.loss for step in take_steps(without, 2)]


def test_a_tied_head_stays_tied(train: Any, tmp_path: Path) -> None:
    """B052: one matrix through 20 steps, a save and a load; both of its uses add to its gradient."""
    first = train("first", "--train-iters 10 --fp64 --hidden-dropout 0 --attention-dropout 0")
    assert "param/head.weight" not in checkpoint(first, 10)
    values = {"fp64": True, **NO_DROPOUT, "train_iters": 20, "load": str(first.folder)}
    tied = opened(tmp_path / "cache", values)
    take_steps(tied, 10)
    assert "head.weight" not in dict(tied.state.model.named_parameters())

    untied = opened(
        tmp_path / "cache", {"fp64": True, **NO_DROPOUT, "untie_embeddings_and_output_weights": True}
    )
    source, target = dict(tied.state.model.named_parameters()), dict(untied.state.model.named_parameters())
    for name, param in target.items():
        param.data.copy_(source["embedding.word.weight" if name == "head.weight" else name].data)
    batch, losses = tied.splits.train.batch(0, 4), []
    for run in (tied, untied):
        run.state.optimizer.buffers.zero_grad()
        hidden = run.state.model(batch.tokens_BS, batch.positions_BS, MaskSpec())
        losses.append(run.state.model.loss(hidden, batch.labels_BS, batch.loss_mask_BS.double()))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=FP64)
    both = gradients(untied)
    assert both["head.weight"].norm() > 0 < both["embedding.word.weight"].norm()
    summed = both["head.weight"] + both["embedding.word.weight"]
    assert distance({"word": gradients(tied)["embedding.word.weight"]}, {"word": summed}) < FP64


@pytest.mark.parametrize(
    ("precision", "model"), [("fp64", {}), ("fp32", LLAMA), ("bf16", {}), ("bf16", LLAMA), ("fp16", LLAMA)]
)
def test_every_precision_learns(tmp_path: Path, precision: str, model: dict[str, Any]) -> None:
    """One batch again and again is learned by heart, with dropout: from ln 101 = 4.6 to less than a third."""
    run = opened(tmp_path, {precision: True, **model, "train_iters": 40, "lr_decay_style": "constant"})
    step, batch = run.make_step(), next(run.batches())
    losses = [step(batch).loss for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(101), abs=0.1)
    assert losses[-1] < losses[0] / 3


def test_fp16_overflows_and_recovers(tmp_path: Path) -> None:
    """From 2^32 the scale halves at each overflow but the first, until steps are applied; it grows later."""
    values = {"fp16": True, "train_iters": 40, "loss_scale_window": 4, "lr_decay_style": "constant"}
    run = opened(tmp_path, values)
    untouched = digest(run.state.tensors())
    (first,) = take_steps(run, 1)
    assert not first.result.applied and first.result.overflow and math.isfinite(first.loss)
    assert digest(run.state.tensors()) == untouched
    steps = [first, *take_steps(run)]
    applied = [step.result.applied for step in steps]
    scales = [step.result.loss_scale for step in steps]
    begin = applied.index(True)
    assert 2 < begin < 30 and not any(applied[:begin])
    assert scales[: begin + 1] == [2.0**32, *(2.0 ** (32 - halved) for halved in range(begin))]
    assert any(after == 2 * before for before, after in pairwise(scales))
    assert steps[-1].loss < steps[begin].loss - 0.5
    # Overflows are no errors: they are skipped, and not counted among the steps with NaN.
    assert run.state.optimizer.skipped_steps == applied.count(False)
    assert run.state.nonfinite_steps == 0


def test_main_parameters_are_finer_than_those_of_the_gemms(tmp_path: Path) -> None:
    """In bf16 small updates add up in fp32; the parameter that a GEMM reads is their rounding."""
    run = opened(tmp_path, {"bf16": True, "lr": 1e-5})
    buffers = run.state.optimizer.buffers
    take_steps(run)
    finer = 0
    for name, main in buffers.views("main_param").items():
        param = buffers.views("param")[name]
        assert (main.dtype, param.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(param, main.bfloat16())
        finer += int((main != param.float()).sum())
    assert finer > sum(main.numel() for main in buffers.views("main_param").values()) / 2
