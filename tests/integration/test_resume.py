"""A run cut anywhere and resumed is the uncut run, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from .conftest import TINY, Run
from .test_interrupted import ENDLESS

VARIANTS = {
    "plain": "",
    "accumulation": "--micro-batch-size 1",
    "dropout": "--hidden-dropout 0.2 --attention-dropout 0.2 --attention-backend unfused",
    "no-dropout-flash": "--hidden-dropout 0 --attention-dropout 0",
    "ramp-up": "--micro-batch-size 1 --rampup-batch-size 1 1 8 --hidden-dropout 0",
    "bf16": "--bf16",
    "bf16-grads": "--bf16 --grad-reduce-in-bf16",
    "bf16-storage": "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
    "8-bit moments": "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    "offloaded": "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    "fp16": "--fp16 --initial-loss-scale 1024 --loss-scale-window 2",
    "fp64": "--fp64",
    "cyclic": "--dataloader-type cyclic",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --qk-layernorm "
    "--softmax-type learnable",
    "schedule": "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay-incr-style linear "
    "--start-weight-decay 0 --end-weight-decay 0.2 --decoupled-lr 3e-3",
    "sync-save": "--no-async-save",
    "deterministic": "--deterministic-mode",
    "fp8": "--fp8 --hidden-size 32 --hidden-dropout 0.1 --fp8-amax-history-len 2",
    "fp8-tensorwise": "--fp8 --fp8-recipe tensorwise --hidden-size 32 --micro-batch-size 1",
}


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of the run's last checkpoint."""
    newest = run.folder / "checkpoints" / (run.folder / "checkpoints" / "latest").read_text().strip()
    found = {}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_resume_is_bit_identical(train: Any, name: str) -> None:
    """B104: a run cut at step 3 and resumed equals the uncut run: losses, weights and moments."""
    flags = VARIANTS[name]
    whole = train("whole", f"{flags} --eval-interval 2")
    cut = train("cut", f"{flags} --eval-interval 2 --exit-interval 3")
    assert len(cut.losses) == 3
    resumed = train("cut", f"{flags} --eval-interval 2 --load {cut.folder}")
    assert resumed.losses == whole.losses
    assert resumed.valid_losses == whole.valid_losses
    saved, wanted = weights(resumed), weights(whole)
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(("batch", "steps"), [(2, 6), (8, 1)])
def test_resumes_with_another_batch(train: Any, batch: int, steps: int) -> None:
    """What is left of the samples is trained on, once; cut again there it is the same run."""
    base = TINY.replace("--train-iters 6", "--train-samples 24").replace("--global-batch-size 4", "")
    first, then = (f"--micro-batch-size 1 --global-batch-size {size}" for size in (4, batch))
    train("whole", f"{first} --exit-interval 3", base)
    whole = train("whole", f"{then} --load whole", base)
    assert f"steps take {batch} samples from here on" in whole.output
    taken = [record["consumed_samples"] for record in whole.records()]
    assert taken == [4, 8, 12, *(12 + batch * step for step in range(1, steps + 1))]
    train("cut", f"{first} --exit-interval 3", base)
    again = train("cut", f"{then} --load cut --exit-interval 4", base)
    if steps > 1:
        again = train("cut", f"{then} --load cut", base)
        assert "samples from here on" not in again.output
    assert again.losses == whole.losses
    assert [record["lr"] for record in again.records()] == [record["lr"] for record in whole.records()]


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_another_order_of_samples_is_said(train: Any, loader: str) -> None:
    """More epochs shuffle all samples anew: what was seen may come again."""
    few = f"--split 998,1,1 --seq-length 1024 --dataloader-type {loader} --eval-iters 0"
    train("run", f"{few} --exit-interval 2")
    within = train("run", f"{few} --load run --train-iters 100 --exit-interval 3")
    assert "another order" not in within.output  # 400 samples of the 500 that an epoch has
    beyond = train("run", f"{few} --load run --train-iters 400 --exit-interval 4")
    assert "come in another order" in beyond.output
    seeded = train("run", f"{few} --load run --train-iters 400 --seed 3 --exit-interval 5")
    assert "come in another order" in seeded.output


def test_what_ends_early_has_a_line_of_its_last_steps_and_no_evaluation(train: Any) -> None:
    run = train("run", "--log-interval 4 --exit-interval 5")
    assert "iteration        4/" in run.output and "iteration        5/" in run.output
    assert run.valid_losses == []


def test_a_run_that_goes_on_has_no_summary_yet(train: Any, monkeypatch: Any) -> None:
    """What an earlier part reached is not what the run did: a kill leaves metrics.jsonl alone."""
    run = train("run", "--exit-interval 3")
    assert run.summary["steps"] == 3

    def killed(*_: Any, **__: Any) -> None:
        assert not (run.folder / "summary.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("redline.run.spine.train", killed)
    with pytest.raises(AssertionError):
        train("run", "--load run")
    assert not (run.folder / "summary.json").exists()


def test_same_seed_same_run_and_other_seed_other_run(train: Any) -> None:
    first, second = train("a"), train("b")
    assert first.losses == second.losses
    assert train("c", "--seed 1").losses != first.losses


def test_resume_after_a_later_crash_drops_the_lost_steps(train: Any) -> None:
    """Steps behind the last checkpoint are run again, and stand in metrics.jsonl once."""
    run = train("run", "--save-interval 2 --exit-interval 5")
    newest = run.folder / "checkpoints" / "iter_0000005"
    for path in sorted(newest.iterdir()):
        path.unlink()
    newest.rmdir()
    resumed = train("run", f"--load {run.folder}")
    assert "step 4" in resumed.output
    assert [record["step"] for record in resumed.records()] == [1, 2, 3, 4, 5, 6]
    assert resumed.losses == train("whole").losses


def test_first_load_of_an_empty_folder_starts_afresh(train: Any, tmp_path: Path) -> None:
    run = train("run", f"--load {tmp_path / 'run'}")
    assert "starting at step 0" in run.output
    assert len(run.losses) == 6


def test_data_cursor_with_accumulation(train: Any) -> None:
    """B098: after 5 steps of 4 samples the next one begins with sample 20."""
    train("run", "--micro-batch-size 1 --exit-interval 5")
    resumed = train("run", "--micro-batch-size 1 --load run")
    assert [record["consumed_samples"] for record in resumed.records()] == [4, 8, 12, 16, 20, 24]


def test_schedule_on_resume(train: Any) -> None:
    """B110: a changed schedule acts from the first step and is announced; the checkpoint's can be kept."""
    constant = "--lr-decay-style constant --lr 6e-4"
    train("run", f"{constant} --exit-interval 3")
    changed = train(
        "run", "--lr-decay-style cosine --lr 3e-5 --lr-warmup-iters 0 --load run --exit-interval 4"
    )
    assert "the options given now win over the checkpoint's" in changed.output
    # Step 4 of 6 of a cosine from 3e-5: halfway down.
    assert changed.records()[3]["lr"] == pytest.approx(1.5e-5, rel=1e-6)
    overridden = train("other", f"{constant} --exit-interval 3 --save-interval 1")
    assert overridden.records()[0]["lr"] == 6e-4
    silent = train("other", "--lr-decay-style constant --lr 3e-5 --load other --override-opt_param-scheduler")
    assert silent.records()[3]["lr"] == 3e-5
    assert "options given now win" not in silent.output
    kept = train("third", f"{constant} --exit-interval 3")
    kept = train("third", "--lr 3e-5 --load third --use-checkpoint-opt-param-scheduler")
    assert kept.records()[3]["lr"] == 6e-4


def test_what_acts_only_at_the_start_is_not_said_to_be_used(train: Any) -> None:
    """The scale reached goes on, and the weights."""
    first = train("run", "--fp16 --initial-loss-scale 1024 --loss-scale-window 1 --exit-interval 3")
    assert [record["loss_scale"] for record in first.records()] == [1024, 2048, 4096]
    later = "--fp16 --loss-scale-window 1 --initial-loss-scale 64 --load run"
    again = train("run", f"{later} --init-method-std 0.01 --embedding-init-method-std 0.1 --exit-interval 4")
    assert again.records()[3]["loss_scale"] == 8192
    said = {line.split(":")[1].strip(): line for line in again.output.splitlines() if "resume:" in line}
    for name, goes_on in {
        "optim.initial_loss_scale": "loss scale goes on",
        "model.init_method_std": "weights go on",
        "model.embedding_init_method_std": "weights go on",
    }.items():
        assert f"it acts only at the start of a run: the checkpoint's {goes_on}." in said[name]
    fixed = train("run", "--fp16 --loss-scale 8 --load run --exit-interval 5").output
    assert "initial_loss_scale: 64.0 in the checkpoint, 4294970000.0 now; it has no effect" in fixed
    given = train("run", f"{later} --exit-interval 6")  # a fixed scale leaves none to go on with
    assert given.records()[5]["loss_scale"] == 64
    assert "4294970000.0 in the checkpoint, 64.0 now; the value given now is used." in given.output


def test_without_optimizer_states_the_loss_scale_begins_as_given(train: Any) -> None:
    flags = "--fp16 --loss-scale-window 1 --initial-loss-scale"
    train("run", f"{flags} 1024 --exit-interval 3")
    afresh = train("run", f"{flags} 32 --load run --no-load-optim --exit-interval 4")
    assert afresh.records()[3]["loss_scale"] == 32
    assert "1024.0 in the checkpoint, 32.0 now; the value given now is used." in afresh.output


def test_a_schedule_that_is_kept_is_not_said_to_be_replaced(train: Any) -> None:
    train("run", "--weight-decay 0.1 --min-lr 1e-4 --exit-interval 3")
    flags = "--weight-decay 0.2 --min-lr 1e-3 --load run --exit-interval"
    kept = train("run", f"{flags} 4 --use-checkpoint-opt-param-scheduler").output
    for change in (
        "optim.weight_decay: 0.1 in the checkpoint, 0.2",
        "optim.min_lr: 0.0001 in the checkpoint, 0.001",
    ):
        assert f"resume: {change} now; the checkpoint's schedule is used" in kept
    assert "weight_decay: 0.1 in the checkpoint, 0.2 now; the value given now" not in kept


def test_finetune_takes_weights_alone(train: Any, tmp_path: Path) -> None:
    first = train("first")
    tuned = train("tuned", f"--finetune --load {first.folder}")
    assert [record["step"] for record in tuned.records()] == [1, 2, 3, 4, 5, 6]
    # The same data again, from weights that have seen it: a lower first loss.
    assert tuned.losses[0] < first.losses[0]
    pretrained = train("pre", f"--pretrained-checkpoint {first.folder} --load {tmp_path / 'pre'}")
    assert pretrained.losses == tuned.losses


def test_without_optimizer_states(train: Any, redline: Any) -> None:
    """--no-load-optim keeps the place and forgets the moments; --no-save-optim writes weights alone."""
    train("run", "--exit-interval 3")
    fresh = train("run", "--load run --no-load-optim")
    assert len(fresh.losses) == 6
    assert fresh.losses[3:4] == train("whole").losses[3:4]  # weights and data are the same
    assert fresh.losses[4] != train("whole2").losses[4]  # the update is not
    bare = train("bare", "--no-save-optim")
    assert not any(name.startswith("exp_avg") for name in weights(bare))
    code, _, err = redline(f"train {TINY} --train-iters 8 --load bare --save bare")
    assert code == 1
    assert "holds no optimizer states" in err and "--no-save-optim" in err and "add --no-load-optim" in err
    train("bare", "--train-iters 8 --load bare --no-load-optim")


def test_use_checkpoint_args(train: Any, redline: Any, tmp_path: Path) -> None:
    """The model's shape comes from the checkpoint, whatever the command line assumes."""
    train("run", "--exit-interval 3")
    words = TINY.replace("--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4", "")
    code, _, err = redline(f"train {words} --load run --save run --use-checkpoint-args")
    assert code == 0, err
    assert Run(tmp_path / "run", "").losses == train("whole").losses


def test_resuming_a_finished_run_leaves_it_alone(train: Any) -> None:
    run = train("run")
    summary = run.summary
    again = train("run", "--load run")
    assert "nothing is left to train" in again.output
    assert again.summary == summary and len(again.losses) == 6


def test_a_finished_run_whose_summary_is_broken(train: Any, redline: Any) -> None:
    """Is told so; without the file, the run writes another."""
    run = train("run")
    path = run.folder / "summary.json"
    path.write_text('{"name": ')
    code, _, err = redline(f"train {TINY} --load run --save run")
    assert code == 1 and "Traceback" not in err
    assert "summary.json cannot be read" in err and "mend:" in err
    path.unlink()
    assert train("run", "--load run").summary["outcome"] == "finished"


def test_rotary_positions_do_not_tie_a_model_to_its_sequence_length(train: Any) -> None:
    """Nor does dropout make it another model."""
    rope = "--position-embedding-type rope"
    first = train("first", rope)
    longer = train(
        "longer", f"{rope} --seq-length 32 --hidden-dropout 0 --pretrained-checkpoint {first.folder}"
    )
    assert longer.losses[0] < first.losses[0]


def test_checkpoint_of_another_model_is_refused(train: Any, redline: Any) -> None:
    train("run", "--exit-interval 3")
    code, _, err = redline(f"train {TINY} --hidden-size 64 --load run --save other")
    assert code == 1
    assert "hidden: 32 in the checkpoint, 64 now" in err
    assert "take them from the checkpoint with --use-checkpoint-args" in err
    code, _, err = redline(f"train {TINY} --hidden-size 64 --load run --save other --use-checkpoint-args")
    assert code == 1 and "hidden: 32 in the checkpoint, 64 now" in err
    assert "leave the model options that differ out" in err


@pytest.mark.parametrize(("flag", "may_be_missing"), [("--load", True), ("--pretrained-checkpoint", False)])
def test_only_a_folder_to_go_on_in_may_be_missing(redline: Any, flag: str, may_be_missing: bool) -> None:
    code, _, err = redline(f"train {TINY} {flag} nowhere")
    assert code == 1 and f"{flag} nowhere is not a folder" in err
    assert ("with the same folder for --save" in err) is may_be_missing


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_exits(tmp_path: Path, signal_number: int) -> None:
    """SIGTERM and SIGINT end the run after the running step with a checkpoint and exit code 0."""
    folder = tmp_path / "run"
    words = TINY.replace("--train-iters 6", ENDLESS)
    process = subprocess.Popen(
        [sys.executable, "-m", "redline", "train", *words.split(), "--save", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal_number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert (folder / "checkpoints" / f"iter_{steps:07d}" / "values.json").exists()
    assert f"{signal.Signals(signal_number).name} received" in " ".join(out.split())
