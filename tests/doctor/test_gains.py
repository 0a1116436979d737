"""Every finding has a gain with its basis, or says why nobody can know it."""

from dataclasses import replace
from pathlib import Path

import pytest
from good_launch import case_of, script
from test_checks import BAD, MOE, NO_LAYOUT, OVERLAPS, SMALL, Bad

from redline.doctor import CHECKS, LANGUAGES, Case, Finding, Machine, diagnose, phrases
from redline.doctor.gains import UNKNOWN
from redline.doctor.links import linked
from redline.doctor.machine import NcclLog, Nic, Pair
from redline.doctor.runs import RunRecord
from redline.formulas.traffic import skipped_share
from redline.hardware import hardware_named
from redline.ledger import Loss
from redline.ledger.causes import CAUSES
from redline.plan.cost_rates import rates_of

FP16 = ("--bf16", "--grad-reduce-in-bf16", "--fp8-format", "--fp8-recipe", "--first-last-layers-bf16",
        "--fp8-param-gather")  # fmt: skip


LONG = {"--seq-length": "32768", "--max-position-embeddings": "32768"}


def found(case: Case, id: str) -> Finding:
    return next(each for each in diagnose(case).findings if each.id == id)


@pytest.mark.parametrize("bad", BAD[::3], ids=lambda bad: f"{bad.id}{'-' + next(iter(bad.change), '')}")
def test_no_figure_without_a_reason(bad: Bad, tmp_path: Path) -> None:
    case = case_of(tmp_path, script(bad.change, bad.without, bad.env), gpu=bad.gpu, gpus=bad.gpus)
    reasons = {text for name, text in phrases("en").items() if name.startswith("unknown_")}
    for each in diagnose(case).findings:
        assert each.gain.basis
        if each.gain.step_time is None:
            assert each.gain.basis in reasons, each.id
        else:
            assert -1 < each.gain.step_time < 1 and each.gain.basis not in reasons


def test_every_check_has_a_reason_where_the_model_is_blind() -> None:
    errors = {each.id for each in CHECKS if each.severity == "error"}
    modelled = "RL001 RL002 RL004 RL005 RL006 RL007 RL010 RL012 RL101 RL104 RL121 RL205 RL206 RL208 RL209 "
    modelled += "RL210 RL211 RL212 RL213 RL214 RL215 RL219 RL407"
    assert {each.id for each in CHECKS} - errors - set(modelled.split()) <= set(UNKNOWN)
    for lang in LANGUAGES:
        assert {f"unknown_{why}" for why in UNKNOWN.values()} <= set(phrases(lang))


def test_fp16_costs_skipped_steps_and_a_pass_over_the_gradients(tmp_path: Path) -> None:
    """At most two of 1002 steps at Megatron's window and hysteresis; none under a fixed scale."""
    assert skipped_share(1000, 2) == pytest.approx(2 / 1002)
    gain = found(case_of(tmp_path, script({"--fp16": None}, FP16)), "RL003").gain
    assert gain.step_time is not None and 2 / 1002 <= gain.step_time < 0.02 and "cost model" in gain.basis
    often = {"--fp16": None, "--loss-scale-window": "10", "--hysteresis": "2"}
    more = found(case_of(tmp_path, script(often, FP16)), "RL003").gain
    assert more.step_time is not None and more.step_time > gain.step_time + 0.1
    fixed = found(case_of(tmp_path, script({"--fp16": None, "--loss-scale": "1024"}, FP16)), "RL003").gain
    assert fixed.step_time is not None and fixed.step_time < gain.step_time


def test_overlap_of_a_mixture_is_modelled(tmp_path: Path) -> None:
    gain = found(case_of(tmp_path, script(MOE, OVERLAPS)), "RL005").gain
    assert gain.step_time is not None and gain.step_time > 0 and "cost model" in gain.basis


@pytest.mark.parametrize(
    ("change", "without", "value"),
    [
        ({}, (), None),
        (SMALL | LONG | {"--context-parallel-size": "4"}, NO_LAYOUT, None),
        (SMALL | {"--use-torch-fsdp2": None}, (*NO_LAYOUT, "--overlap-param-gather"), "1"),
    ],
    ids=("tp", "cp", "fsdp"),
)
def test_one_queue_is_modelled(
    change: dict[str, str | None], without: tuple[str, ...], value: str | None, tmp_path: Path
) -> None:
    text = script(change, without, {"CUDA_DEVICE_MAX_CONNECTIONS": value})
    gain = found(case_of(tmp_path, text), "RL008").gain
    assert gain.step_time is not None and gain.step_time >= 0 and "cost model" in gain.basis


def test_links_come_from_data_sheets() -> None:
    """Sockets: 100 Gbit/s of Ethernet over 8 GPUs against 400 a GPU. Host memory: PCIe against NVLink."""
    sheet = hardware_named("h100")
    assert sheet is not None
    fast = rates_of(sheet)
    slow = linked(fast, sheet, {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}, None)
    assert fast.network.bytes_per_s / slow.network.bytes_per_s == pytest.approx(32)
    assert fast.node.bytes_per_s / slow.node.bytes_per_s == pytest.approx(450 * 0.76 / (64 * 0.375))
    seen = Machine(nics=(Nic("eth0", "ethernet", "up", 200.0),), links=(Pair(0, 1, "SYS"),))
    assert linked(fast, sheet, {"NCCL_NET": "Socket"}, seen).network.bytes_per_s == pytest.approx(
        2 * slow.network.bytes_per_s
    )
    assert linked(fast, sheet, {}, seen).node == slow.node
    measured = hardware_named("h200")
    assert measured is not None and rates_of(measured).collectives
    assert not linked(rates_of(measured), measured, {}, seen).collectives, "they were measured over NVLink"
    few = linked(fast, sheet, {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, None)
    assert few.network.bytes_per_s == pytest.approx(fast.network.bytes_per_s / 4)
    assert linked(fast, sheet, {"NCCL_IB_HCA": "mlx5"}, None) == fast


@pytest.mark.parametrize(
    "log", [NcclLog("2.27", "Socket", "NET/Socket : Using eth0", {}), NcclLog("2.27", "IB", "", {"SHM": 8})]
)
def test_a_log_of_slow_links_has_a_gain(log: NcclLog, tmp_path: Path) -> None:
    case = replace(case_of(tmp_path, script()), machine=Machine(nccl=log))
    gain = found(case, "RL009").gain
    assert gain.step_time is not None and 0.05 < gain.step_time < 1 and "data sheets" in gain.basis
    healthy = replace(case, machine=Machine(nccl=NcclLog("2.27", "IB", "", {"P2P": 8})))
    assert case.cost is not None and healthy.cost is not None
    assert gain.step_time == pytest.approx(1 - healthy.cost.step_s / case.cost.step_s)


def test_uneven_lengths(tmp_path: Path) -> None:
    """A mask of documents is modelled: it rules flash attention out. The lengths themselves nobody knows."""
    masked = found(case_of(tmp_path, script({"--reset-attention-mask": None})), "RL011").gain
    assert masked.step_time is not None and masked.step_time > 0.05
    varying = found(case_of(tmp_path, script({"--variable-seq-lengths": None})), "RL011").gain
    assert varying.step_time is None and "lengths" in varying.basis


def test_evaluation_saves_the_difference(tmp_path: Path) -> None:
    change: dict[str, str | None] = {"--eval-iters": "300", "--eval-interval": "100"}
    gain = found(case_of(tmp_path, script(change)), "RL407").gain
    assert gain.step_time == pytest.approx(1 - (100 + 2) / (100 + 100))  # six iterations of a third are left


def test_ledger_bounds_what_the_model_does_not_see(tmp_path: Path) -> None:
    mends = CAUSES["logging"].mends
    logging = Loss(
        key="logging", account="host", cause="logging", ms=1.0, share=0.12, points=None, mends=mends
    )
    run = RunRecord(steps=50, step_s=60.0, tokens_per_s=1.0, mfu=0.3, losses=(logging,))
    case = replace(case_of(tmp_path, script({"--log-interval": "1"})), run=run)
    gain = found(case, "RL401").gain
    assert gain.step_time is None and "at most 12.0% of the step" in gain.basis


def test_trifles_are_not_spoken_of(tmp_path: Path) -> None:
    """Dropout and fp8 gathers that change neither time nor memory visibly; a wide model is no toy."""
    off = script({"--attention-dropout": "0.1", "--hidden-dropout": "0.0"})
    assert "RL112" not in {each.id for each in diagnose(case_of(tmp_path, off)).findings}
    thin: dict[str, str | None] = {
        "--hidden-size": "5120",
        "--num-attention-heads": "40",
        "--seq-length": "512",
        "--ffn-hidden-size": "13824",
        "--tensor-model-parallel-size": "8",
    }
    listed = {each.id for each in diagnose(case_of(tmp_path, script(thin))).findings}
    assert "RL119" not in listed
