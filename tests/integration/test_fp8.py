"""fp8 in whole runs: what it begins from, what it says, what an evaluation leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.config import parse_args
from redline.errors import CheckpointError, ConfigError
from redline.formulas.activations import MicrobatchShape
from redline.hardware import Hardware
from redline.model import EngineFp8, Fp8Gemms
from redline.model.fp8 import Fp8Gemm, Fp8Site
from redline.plan import make_plan
from redline.report.html.page import make_page
from redline.report.html.runs import read_runs
from redline.run.fp8 import Fp8Watch
from redline.run.resume import Start, fp8_changes
from redline.step import TrainState, returned_in

from .tiny import opened, take_steps, valid_loss

MODEL = {"hidden_size": 32}
FP8 = {**MODEL, "fp8_format": "hybrid"}
FLAGS = "--hidden-size 32"


def test_a_bf16_checkpoint_continues_in_fp8_and_back(train: Any) -> None:
    train("run", f"{FLAGS} --bf16 --exit-interval 2")
    train("run", f"{FLAGS} --bf16 --fp8 --load run --exit-interval 4")
    back = train("run", f"{FLAGS} --bf16 --load run")
    bf16 = train("bf16", f"{FLAGS} --bf16")
    assert back.losses[:2] == bf16.losses[:2]
    assert back.losses[2:] != bf16.losses[2:]
    assert back.losses == pytest.approx(bf16.losses, rel=5e-3)


def test_another_length_of_history_starts_the_scales_anew(train: Any) -> None:
    train("run", f"{FLAGS} --fp8 --fp8-amax-history-len 4 --exit-interval 3")
    resumed = train("run", f"{FLAGS} --fp8 --fp8-amax-history-len 8 --load run")
    assert len(resumed.losses) == 6 and "fp8 scales" in resumed.output


def test_another_format_starts_the_scales_anew(train: Any) -> None:
    """A scale made for E5M2 is up to 128 times too large for E4M3, and in reverse as much too small."""
    train("run", f"{FLAGS} --fp8 --exit-interval 3")
    resumed = train("run", f"{FLAGS} --fp8-e4m3 --load run --log-interval 1")
    assert "fp8 scales: measured anew" in resumed.output and "fp8 cut off" not in resumed.output


@pytest.mark.parametrize(
    "more",
    [{}, {"fp8_recipe": "tensorwise"}, {"recompute_granularity": "full", "recompute_method": "block",
                                        "recompute_num_layers": 1}],
    ids=["delayed", "tensorwise", "recomputed"],
)  # fmt: skip
def test_the_input_of_proj_is_attention_s_output(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept once, in 16 bits, and cast again: the bits of a copy in fp8 that is kept, over microbatches."""
    values = {**FP8, "hidden_dropout": 0.0, "attention_dropout": 0.0, "micro_batch_size": 1, **more}
    losses, kept = [], []
    for again in (True, False):
        monkeypatch.setattr(MicrobatchShape, "keeps_attention_output", again)
        run = opened(tmp_path, values)
        sites = [layer.attention.proj_site for layer in run.state.model.layers]
        assert all(isinstance(site, Fp8Site) and site.again == again for site in sites)
        losses.append([(step.loss, step.result.grad_norm) for step in take_steps(run)])
        kept.append([tensor.clone() for tensor in run.state.tensors().values()])
    assert losses[0] == losses[1]
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_weights_cast_in_each_pass_or_once_a_step_give_the_same_bits(recipe: str, train: Any) -> None:
    """Over microbatches, evaluations, a table and a resume; no copy is held where none is kept."""
    flags = f"{FLAGS} --fp8 --fp8-recipe {recipe} --micro-batch-size 1 --no-fp8-param-gather"
    flags += " --eval-interval 2 --fp8-stats-interval 3"
    once, each = train("once", flags), train("each", f"{flags} --no-parameter-transpose-cache")
    both = train("both", f"{flags} --keep-fp8-transpose-cache")
    assert once.losses == each.losses == both.losses and once.valid_losses == each.valid_losses
    tables = [(run.folder / "fp8.jsonl").read_text() for run in (once, each)]
    assert tables[0] == tables[1]
    held = [run.summary["measured_memory"].get("fp8_copies", 0) for run in (each, once, both)]
    assert held[0] == 0 < held[1] and held[2] == 2 * held[1]
    train("cut", f"{flags} --exit-interval 3")
    assert train("cut", f"{flags} --no-parameter-transpose-cache --load cut").losses == once.losses


def test_an_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    plain, evaluated = opened(tmp_path, FP8), opened(tmp_path, FP8)
    losses = []
    for run in (plain, evaluated):
        found = []
        for _ in range(3):
            found += [step.loss for step in take_steps(run, 1)]
            if run is evaluated:
                valid_loss(run)
        losses.append(found)
    assert losses[0] == losses[1]


def test_what_stays_in_bf16_is_said(tmp_path: Path) -> None:
    """B042: the dimension that does not fit is the one that is named, with the sizes that would."""
    said: list[str] = []
    run = opened(tmp_path, {**FP8, "ffn_hidden_size": 40, "fp8_keep_bf16": ("*.proj",)}, said.append)
    stays = [line.removeprefix("in bf16 beside fp8: ") for line in said if "in bf16 beside fp8" in line]
    reasons = {choice.why for choice in run.choices if choice.what == "in bf16 beside fp8"}
    fit = "size 40 is no multiple of 16 (the nearest are 32 and 48)"
    assert reasons == {
        f"layers.0.mlp.fc1, layers.1.mlp.fc1: its output {fit}",
        f"layers.0.mlp.fc2, layers.1.mlp.fc2: its input {fit}",
        "layers.0.attention.proj, layers.1.attention.proj: --fp8-keep-bf16 *.proj",
    }
    assert {line.removesuffix(".") for line in stays} == reasons  # by name, and before the first step
    assert run.state.fp8 is not None and len(run.state.fp8.gemms) == 2


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nosuch\* matches no GEMM[^$]*layers\.0\.attention\.qkv[^$]*1\.mlp\.fc2"
    ):
        opened(tmp_path, {**FP8, "fp8_keep_bf16": ("*.proj", "nosuch*")})


@pytest.mark.parametrize("options", [{"make_vocab_size_divisible_by": 1}, {"hidden_size": 40}], ids=str)
def test_a_head_that_no_gemm_in_fp8_takes_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16[^$]*the layers run in fp8 without it"):
        opened(tmp_path, {**FP8, "ffn_hidden_size": 64, "fp8_output_proj": True, **options})


BLOCKS = {"hidden_size": 128, "ffn_hidden_size": 128, "fp8_emulate": True}
HEADS = {
    "delayed": {},
    "untied": {"untie_embeddings_and_output_weights": True, "gradient_accumulation_fusion": False},
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_recipe": "blockwise", **BLOCKS},
    "mxfp8": {"fp8_recipe": "mxfp8", "fp8_format": "e4m3", **BLOCKS},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_fp8_beside_every_recipe(name: str, tmp_path: Path) -> None:
    """From the same weights near a head in bf16, and not the same; recomputed layers leave every bit."""
    values = {**FP8, "micro_batch_size": 1, "train_iters": 2, **HEADS[name]}
    head = {**values, "fp8_output_proj": True}
    plain, found = (opened(tmp_path, each) for each in (values, head))
    (wanted,), (first,) = take_steps(plain, 1), take_steps(found, 1)
    assert first.loss == pytest.approx(wanted.loss, rel=2e-3) and first.loss != wanted.loss
    assert first.result.grad_norm == pytest.approx(wanted.result.grad_norm, rel=0.05)
    take_steps(found, 1)
    assert isinstance(found.state.fp8, Fp8Gemms) and found.state.fp8.head is not None
    found.state.fp8.prepare()
    cast, scale = found.state.fp8.head.q_VH.float(), found.state.fp8.head.inverse
    torch.testing.assert_close(  # the cast of the weight follows it: 3 bits of mantissa, 2^-9 the least step
        cast * scale, found.state.model.head_weight.float(), rtol=2**-4, atol=2**-10 * scale.item()
    )
    if name == "delayed":
        again = opened(tmp_path, {**head, **RECOMPUTE["full"]})
        take_steps(again, 2)
        held, there = (run.state.tensors() for run in (found, again))
        assert all(torch.equal(tensor, there[key]) for key, tensor in held.items())


SITES = tuple(
    f"layers.{n}.{part}"
    for n in range(2)
    for part in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
)

RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "activation", "core_attn"),
    },
}


@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("options", [{}, {"fp8_recipe": "tensorwise"}, {"fp8_wgrad": False}], ids=str)
def test_recompute_changes_no_bit(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    """B034, B035: what is computed again is cast as before, over microbatches and steps, the first too."""
    values = {**FP8, "micro_batch_size": 1, **options}
    runs = [opened(tmp_path, each) for each in (values, {**values, **RECOMPUTE[how]})]
    found = [([step.loss for step in take_steps(run, 3)], run.state.tensors()) for run in runs]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


def test_b034_b035_a_recomputed_forward_runs_in_fp8_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many fp8 GEMMs again as in the forward; four microbatches are near one of four times the size."""
    calls: list[str] = []
    fprop = Fp8Gemm.fprop
    monkeypatch.setattr(Fp8Gemm, "fprop", lambda self, *rest: (calls.append("y"), fprop(self, *rest))[1])
    losses, counts = [], []
    for values in (
        {"micro_batch_size": 1},
        {"micro_batch_size": 1, **RECOMPUTE["full"]},
        {"micro_batch_size": 4},
    ):
        calls.clear()
        losses.append([step.loss for step in take_steps(opened(tmp_path, {**FP8, **values}), 3)])
        counts.append(len(calls))
    assert counts == [3 * 4 * len(SITES), 3 * 4 * 2 * len(SITES), 3 * len(SITES)]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=5e-3)


WIDE = {"hidden_size": 128, "ffn_hidden_size": 128, "fp8_format": "e4m3"}
BLOCKS = {
    "blockwise": {**WIDE, "fp8_recipe": "blockwise"},
    "mxfp8": {**WIDE, "fp8_recipe": "mxfp8", "fp8_emulate": True},
}


@pytest.mark.parametrize("recipe", BLOCKS)
def test_recompute_casts_blocks_as_before(recipe: str, tmp_path: Path) -> None:
    values = {**BLOCKS[recipe], "micro_batch_size": 1}
    runs = [opened(tmp_path, {**values, **each}) for each in ({}, RECOMPUTE["full"], RECOMPUTE["selective"])]
    losses = [[step.loss for step in take_steps(run, 3)] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert all(run.state.fp8 is not None and len(run.state.fp8.gemms) == 8 for run in runs)


def test_scales_of_a_tensor_begin_anew_after_scales_of_blocks(train: Any) -> None:
    """And the table shows what blocks lose; nothing of them is cut off, and there is no one scale."""
    flags = "--hidden-size 128 --ffn-hidden-size 128 --fp8-e4m3 --fp8-recipe"
    run = train("run", f"{flags} blockwise --fp8-stats-interval 2 --exit-interval 4")
    rows = [json.loads(line) for line in (run.folder / "fp8.jsonl").read_text().splitlines()]
    assert len(rows) == 48 and all(row["amax"] > 0 and row["scale"] is None for row in rows)
    assert all(row["saturated"] == 0 for row in rows)
    resumed = train("run", f"{flags} delayed --load run")
    assert len(resumed.losses) == 6 and "fp8 scales: measured anew" in resumed.output


@pytest.mark.parametrize(
    ("recipe", "capability", "says"),
    [
        ("mxfp8", (9, 0), r"10\.0 \(Blackwell\)"),
        ("mxfp8", None, r"10\.0 \(Blackwell\)"),
        ("blockwise", (8, 9), r"9\.0 \(Hopper\)"),
        ("blockwise", (10, 0), "mxfp8"),
    ],
)
def test_recipes_that_a_device_lacks_are_refused(recipe: str, capability: Any, says: str) -> None:
    words = ["--preset", "llama3.2-1b", "--mock-data", "--train-iters", "1", "--fp8", "--fp8-recipe", recipe]
    kind = "cpu" if capability is None else "cuda"
    hardware = Hardware(name="A device", kind=kind, memory_bytes=80 << 30, compute_capability=capability)
    with pytest.raises(ConfigError, match=says):
        make_plan(parse_args(words).config, hardware, 128256)
    plan = make_plan(parse_args([*words, "--fp8-emulate"]).config, hardware, 128256)
    assert plan.fp8 is not None and "emulated: asked for" in plan.fp8.choices[0].why


@pytest.mark.parametrize(("recipe", "capability"), [("blockwise", (9, 0)), ("mxfp8", (10, 0))])
def test_blocks_take_no_e5m2_on_a_gpu(recipe: str, capability: tuple[int, int]) -> None:
    """PyTorch's scaled product knows scales of blocks beside E4M3 alone: hybrid would fail in backward."""
    words = ["--preset", "llama3.2-1b", "--mock-data", "--train-iters", "1", "--fp8-recipe", recipe]
    card = Hardware(name="A card", kind="cuda", memory_bytes=141 << 30, compute_capability=capability)
    with pytest.raises(ConfigError, match=rf"{recipe} does not go with[^$]*E4M3 alone[^$]*use --fp8-e4m3"):
        make_plan(parse_args([*words, "--fp8"]).config, card, 128256)
    plan = make_plan(parse_args([*words, "--fp8-e4m3"]).config, card, 128256)
    assert plan.fp8 is not None and len(plan.fp8.sites) == 64
    theirs = [*words, "--fp8", "--transformer-impl", "transformer_engine"]
    if recipe == "mxfp8":  # NVIDIA's modules multiply the two formats
        assert make_plan(parse_args(theirs).config, card, 128256).fp8 is not None


def test_nothing_left_to_run_in_fp8_is_refused(tmp_path: Path) -> None:
    """With the names of the GEMMs, and sizes that exist: 0 is none."""
    with pytest.raises(ConfigError, match=r"has nothing to act on[^$]*layers\.0\.attention\.qkv, "):
        opened(tmp_path, {**FP8, "fp8_keep_bf16": ("*",)})
    small = {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "hidden_size": 32, "ffn_hidden_size": 132}
    with pytest.raises(ConfigError, match=r"1\.mlp\.fc1: its output size 132[^$]*are 128 and 256") as caught:
        opened(tmp_path, small)
    assert "fc2: its output size 32 is no multiple of 128 (the nearest is 128)" in str(caught.value)


def test_a_card_without_fp8_units_is_refused() -> None:
    config = parse_args(["--preset", "llama3.2-1b", "--mock-data", "--train-iters", "1", "--fp8"]).config
    a100 = Hardware(name="NVIDIA A100", kind="cuda", memory_bytes=80 << 30, compute_capability=(8, 0))
    with pytest.raises(ConfigError, match=r"--fp8-format cannot run on NVIDIA A100\.[^$]*8\.9"):
        make_plan(config, a100, 128256)
    h200 = Hardware(name="NVIDIA H200", kind="cuda", memory_bytes=141 << 30, compute_capability=(9, 0))
    plan = make_plan(config, h200, 128256)
    assert plan.fp8 is not None and len(plan.fp8.sites) == 64
    assert plan.fp8.stored and "fp8_copies" not in plan.memory.fullest.state


def test_tables_of_what_casts_lose(train: Any) -> None:
    """Every third step, and after a resume the same as without: in fp8.jsonl, TensorBoard and the summary."""
    flags = f"{FLAGS} --fp8 --fp8-margin 6 --fp8-stats-interval 3"
    run = train("run", flags)
    rows = [json.loads(line) for line in (run.folder / "fp8.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3] * 24 + [6] * 24
    names = [(site, operand) for site in SITES for operand in ("x", "w", "dy")]
    assert [(row["site"], row["operand"]) for row in rows[24:]] == names
    assert all(row["amax"] > 0 and 0 <= row["saturated"] < 0.1 for row in rows)
    assert any(row["underflowed"] > 0 for row in rows)
    assert len(run.summary["fp8"]) == 8 and "to 0" in run.output
    worst = sorted((row["saturated"] + row["underflowed"] for row in rows[24:]), reverse=True)[:8]
    assert [row["saturated"] + row["underflowed"] for row in run.summary["fp8"]] == worst
    assert all(any(row["site"] in line for line in run.output.splitlines()) for row in run.summary["fp8"])
    assert run.losses == train("plain", f"{FLAGS} --fp8 --fp8-margin 6").losses

    train("cut", f"{flags} --exit-interval 4")
    cut = train("cut", f"{flags} --load cut")
    assert [json.loads(line) for line in (cut.folder / "fp8.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_tables_hold_the_head_s_operands(recipe: str, train: Any) -> None:
    """Last, in fp8.jsonl, TensorBoard and the report; measured, so nothing is cut off; no loss moves."""
    flags = f"{FLAGS} --fp8-e4m3 --fp8-recipe {recipe} --fp8-output-proj --micro-batch-size 1 --train-iters 4"
    flags += " --hidden-size 128 --ffn-hidden-size 128" if recipe == "blockwise" else ""
    run, plain = train("run", f"{flags} --fp8-stats-interval 2"), train("plain", flags)
    assert run.losses == plain.losses
    rows = [json.loads(line) for line in (run.folder / "fp8.jsonl").read_text().splitlines()]
    head = [row for row in rows if row["site"] == "head"]
    assert [(row["step"], row["operand"]) for row in head] == [
        (n, o) for n in (2, 4) for o in ("x", "w", "dy")
    ]
    assert rows[24:27] == head[:3]
    limits = {"x": 448.0, "w": 448.0, "dy": 57344.0}  # that of its gradient is E5M2's, in every format
    for row in head:
        least = limits[row["operand"]] / row["amax"]
        same = row["operand"] == "w"  # of the others the scale is the last cast's, perhaps of smaller values
        assert row["scale"] == pytest.approx(least) if same else row["scale"] > least * (1 - 1e-6)
        assert row["amax"] > 0 and row["saturated"] == 0 and 0 <= row["underflowed"] < 0.1
    assert set(scalars(run.folder, "fp8/amax/head.dy")) == {2, 4}
    (page,) = make_page(read_runs([run.folder])).runs
    assert page.fp8 is not None and [each.gemm for each in page.fp8.groups][-3:] == ["head"] * 3
    assert page.fp8.groups[-1].underflowed.where == f"step {page.fp8.groups[-1].underflowed.step}"


def test_a_sudden_jump_is_reported_and_training_recovers(tmp_path: Path, train: Any) -> None:
    """A weight grows a thousandfold between two steps: it saturates once, is named, and the scale follows."""
    run = opened(tmp_path, {**FP8, "fp8_amax_compute_algo": "most_recent", "fp8_param_gather": False})
    take_steps(run, 2)
    fp8 = run.state.fp8
    assert fp8 is not None
    watch = Fp8Watch(fp8)
    assert watch.overshoot()[1] is None
    run.state.model.layers[1].mlp.fc2.weight.data.mul_(1000.0)
    take_steps(run, 1)
    factor, warning = watch.overshoot()
    assert 500 < factor < 2000 and warning is not None and "layers.1.mlp.fc2, operand w" in warning
    take_steps(run, 2)
    assert not fp8.state.saturated()[SITES.index("layers.1.mlp.fc2"), 1]
    assert all(
        record["fp8_overshoot"] < 4 for record in train("run", f"{FLAGS} --fp8 --log-interval 1").records()
    )


RETURNS = f"{FLAGS} --fp8 --fp8-interval 100 --fp8-return-to-bf16 2"


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """step -> value of one curve that TensorBoard shows."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in found.Scalars(tag)}


def in_fp8(run: Any) -> tuple[str, str]:
    """What the end table and summary.json say of it, and why."""
    (choice,) = (choice for choice in run.summary["choices"] if choice["what"] == "fp8")
    assert choice["why"].split(" of the layers")[0] in re.sub(r"\s+", " ", run.output)
    return choice["ran"], choice["why"]


def test_repeated_overflow_returns_a_gemm_to_bf16_for_good(train: Any) -> None:
    """Scales that are never renewed are outgrown; what has returned stays so through a resume, to the bit,
    and is on record: in each step, in TensorBoard, and at the end what runs then."""
    whole = train("whole", RETURNS)
    said = re.findall(
        r"^(\S+) runs in bf16 from here on: its operand \S+ saturated in 2[^(]* up to step (\d)",
        whole.output,
        re.M,
    )
    found = {site: int(step) for site, step in said}
    assert found and len(found) == len(said) and found == whole.summary["fp8_returned"]
    counts = [sum(step <= each["step"] for step in found.values()) for each in whole.records()]
    assert [each["fp8_returned"] for each in whole.records()] == counts
    assert scalars(whole.folder, "train/fp8_returned") == dict(enumerate(counts, 1))
    ran, why = in_fp8(whole)
    assert why.startswith(f"{8 - len(found)} of 8 GEMMs of the layers; {len(found)} returned to bf16 at step")
    assert ran == ("bf16" if len(found) == 8 else "hybrid")
    (last,) = (each for each in whole.summary["choices"] if "saturated too often" in each["why"])
    assert all(f"{site} (step {found[site]})" in last["why"] for site in sorted(found, key=SITES.index)[:4])
    plain = train("fp8", f"{FLAGS} --fp8 --fp8-interval 100")
    assert whole.losses != plain.losses and "fp8_returned" not in plain.records()[0]
    assert in_fp8(plain)[1].startswith("8 of 8 GEMMs of the layers; emulated")
    train("cut", f"{RETURNS} --exit-interval 4")
    cut = train("cut", f"{RETURNS} --load cut")
    assert cut.losses == whole.losses and cut.summary["fp8_returned"] == found and in_fp8(cut) == (ran, why)
    assert "in bf16 beside fp8: layers." in cut.output  # at the start


def test_what_has_returned_stays_in_bf16_where_scales_are_measured_anew(train: Any) -> None:
    """After another margin, another recipe and a part of the run in bf16; where weights have no copy in 16
    bits that is refused, and a checkpoint of earlier releases, which named no steps, says as much."""
    found = train("run", f"{RETURNS} --exit-interval 4").summary["fp8_returned"]
    assert found
    anew = train("run", f"{RETURNS} --fp8-margin 1 --load run --train-iters 8 --exit-interval 5")
    assert (
        "fp8 scales: measured anew" in anew.output and found.items() <= anew.summary["fp8_returned"].items()
    )
    assert anew.records()[-1]["fp8_returned"] >= len(found)
    assert f"; {len(anew.summary['fp8_returned'])} returned to bf16 at step" in in_fp8(anew)[1]
    found = anew.summary["fp8_returned"]
    plain = train("run", f"{FLAGS} --bf16 --load run --train-iters 8 --exit-interval 6")
    assert plain.summary["fp8_returned"] == found
    values = next((plain.folder / "checkpoints").glob("*6/values.json"))
    state = json.loads(values.read_text())["state"]
    assert state["fp8"] == {"bf16": found}
    assert returned_in({**state, "fp8": {"bf16": list(found)}}) == dict.fromkeys(found, 6)
    blocks = f"{FLAGS} --fp8-e4m3 --fp8-recipe mxfp8 --fp8-emulate --ffn-hidden-size 48"
    again = train("run", f"{blocks} --load run --train-iters 8 --exit-interval 7")
    assert again.summary["fp8_returned"] == found
    with pytest.raises(AssertionError, match=r"back to bf16\.[^$]*--no-fp8-param-gather[^$]*--finetune"):
        train("run", f"{FLAGS} --fp8 --load run --train-iters 8")


def test_nvidia_s_modules_forget_what_had_returned_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take all GEMMs of a layer into fp8; the package itself plays no part in what is remembered."""
    run = opened(tmp_path, FP8)
    values = run.state.values() | {"fp8": {"bf16": {SITES[3]: 5, SITES[6]: 7}}}
    monkeypatch.setattr(EngineFp8, "fits", lambda self, values: False)
    state = TrainState(run.state.model, run.state.optimizer, fp8=object.__new__(EngineFp8))
    state.load_values(values)
    lines = fp8_changes(state, Start(tmp_path, False, {"state": values}))
    assert state.returned == {} and lines[0].startswith("fp8 scales: measured anew")
    assert lines[1:] == [
        f"fp8 again, in NVIDIA's modules, though they had returned to bf16: {SITES[3]}, {SITES[6]}."
    ]


def test_a_table_that_will_not_come_is_said_and_so_is_a_list_given_twice(train: Any) -> None:
    flags = f"{FLAGS} --fp8 --exit-interval 3"
    run = train("run", f"{flags} --fp8-stats-interval 50 --fp8-keep-bf16 layers.0.* --fp8-keep-bf16 *.fc2")
    said = " ".join(run.output.split())
    assert "--fp8-stats-interval 50: its next table is of step 50, and the run ends with 6." in said
    assert "--fp8-keep-bf16 is given twice" in said and not (run.folder / "fp8.jsonl").exists()
    assert "its next table" not in train("six", f"{flags} --fp8-stats-interval 6").output
    late = train("six", f"{FLAGS} --fp8 --fp8-stats-interval 3 --train-iters 5 --load six").output
    assert "--fp8-stats-interval 3: its next table is of step 6, and the run ends with 5." in late


def test_sites_that_have_returned_compute_as_in_bf16(tmp_path: Path) -> None:
    plain = opened(tmp_path, MODEL | {"bf16": True})
    run, alone = opened(tmp_path, {**FP8, "fp8_param_gather": False}), opened(tmp_path, FP8)
    assert isinstance(run.state.fp8, Fp8Gemms) and isinstance(alone.state.fp8, Fp8Gemms)
    run.state.fp8.keep_in_bf16(SITES)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.qkv back to bf16[^$]*--no-fp8-param"):
        alone.state.fp8.keep_in_bf16(SITES)
    assert [step.loss for step in take_steps(run)] == [step.loss for step in take_steps(plain)]
