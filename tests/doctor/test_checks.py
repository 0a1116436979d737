"""Every check finds its fault in a spoiled launch, and nothing in the good one."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from good_launch import GOOD, case_of, script

from redline.doctor import CHECKS, Case, Gpu, Machine, diagnose, facts_of
from redline.doctor.machine import NcclLog, Nic, Pair
from redline.doctor.runs import RunRecord
from redline.hardware import hardware_named

LOCAL = {"--transformer-impl": "local"}
BF16_ONLY = (
    "--fp8-format",
    "--fp8-recipe",
    "--first-last-layers-bf16",
    "--fp8-param-gather",
)
OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")
FULL = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
}
MOE = {
    "--num-experts": "8",
    "--moe-ffn-hidden-size": "4096",
    "--moe-router-topk": "2",
    "--expert-model-parallel-size": "4",
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-grouped-gemm": None,
    "--moe-permute-fusion": None,
    "--overlap-moe-expert-parallel-comm": None,
    "--expert-tensor-parallel-size": "1",
}
SMALL = {  # a model of a billion parameters on one node
    "--num-layers": "16",
    "--hidden-size": "2048",
    "--ffn-hidden-size": "8192",
    "--num-attention-heads": "16",
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
}
NO_LAYOUT = ("--num-layers-per-virtual-pipeline-stage", "--sequence-parallel", "--tp-comm-overlap")


TINY = {**SMALL, "--hidden-size": "512", "--ffn-hidden-size": "1024", "--seq-length": "512"}


@dataclass(frozen=True)
class Bad:
    """How to spoil the good launch so that `id` speaks."""

    id: str
    change: dict[str, str | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    gpu: str = "h100"
    gpus: int = 64
    severity: str = ""
    at: str = ""  # flag or variable whose line the finding must name


BAD = (
    Bad("RL001", LOCAL, at="--transformer-impl"),
    Bad("RL002", LOCAL, at="--transformer-impl"),
    Bad("RL002", {"--attention-backend": "unfused"}, at="--attention-backend"),
    Bad("RL002", env={"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, at="NVTE_FLASH_ATTN"),
    Bad("RL003", {"--fp16": None}, ("--bf16", "--grad-reduce-in-bf16"), at="--fp16"),
    Bad("RL003", {}, ("--bf16", "--grad-reduce-in-bf16", *BF16_ONLY), severity="error"),
    Bad("RL004", {}, ("--use-distributed-optimizer", "--overlap-param-gather", "--fp8-param-gather")),
    Bad("RL005", {}, OVERLAPS),
    Bad("RL006", {}, ("--sequence-parallel", "--tp-comm-overlap")),
    Bad("RL007", FULL, gpu="h200", at="--recompute-granularity"),
    Bad("RL007", {"--micro-batch-size": "2"}, severity="error"),
    Bad("RL008", env={"CUDA_DEVICE_MAX_CONNECTIONS": None}),
    Bad("RL008", env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, severity="error",
        at="CUDA_DEVICE_MAX_CONNECTIONS"),
    Bad("RL008", {"--use-torch-fsdp2": None}, severity="error", at="CUDA_DEVICE_MAX_CONNECTIONS"),
    Bad("RL009", env={"NCCL_IB_DISABLE": "1"}, severity="error", at="NCCL_IB_DISABLE"),
    Bad("RL009", env={"NCCL_P2P_DISABLE": "1"}, at="NCCL_P2P_DISABLE"),
    Bad("RL010", {"--global-batch-size": "32"}, at="--global-batch-size"),
    Bad("RL011", {"--reset-attention-mask": None}, at="--reset-attention-mask"),
    Bad("RL011", {"--variable-seq-lengths": None}, at="--variable-seq-lengths"),
    Bad("RL012", {}, BF16_ONLY, severity="hint"),
    Bad("RL101", {"--vocab-size": "50257", "--no-pad-vocab-size": None}, at="--no-pad-vocab-size"),
    Bad("RL102", {"--kv-channels": "100"}, at="--num-attention-heads"),
    Bad("RL103", {"--ffn-hidden-size": "28660"}, BF16_ONLY, at="--ffn-hidden-size"),
    Bad("RL104", SMALL | {"--seq-length": "1024"}, NO_LAYOUT, gpus=8, at="--micro-batch-size"),
    Bad("RL105", {"--no-gradient-accumulation-fusion": None}, at="--no-gradient-accumulation-fusion"),
    Bad("RL106", {"--no-bias-swiglu-fusion": None}, at="--no-bias-swiglu-fusion"),
    Bad("RL107", {}, ("--cross-entropy-loss-fusion",)),
    Bad("RL108", {"--ffn-hidden-size": "28660"}, severity="error", at="--ffn-hidden-size"),
    Bad("RL109", {"--fp8-recipe": "delayed"}, ("--first-last-layers-bf16",)),
    Bad("RL109", {"--fp8-interval": "4"}, at="--fp8-interval"),
    Bad("RL109", {"--fp8-format": "e4m3"}, at="--fp8-format"),
    Bad("RL110", TINY, NO_LAYOUT,
        gpus=8, at="--fp8-format"),
    Bad("RL111", LOCAL, severity="error", at="--fp8-format"),
    Bad("RL112", {"--hidden-dropout": "0.1"}, at="--hidden-dropout"),
    Bad("RL113", {"--deterministic-mode": None}, at="--deterministic-mode"),
    Bad("RL115", {"--fp32-residual-connection": None}, at="--fp32-residual-connection"),
    Bad("RL116", {}, gpu="a100", severity="error", at="--fp8-format"),
    Bad("RL116", {"--fp8-recipe": "mxfp8"}, severity="error", at="--fp8-recipe"),
    Bad("RL117", MOE, ("--moe-grouped-gemm",)),
    Bad("RL118", MOE, ("--moe-permute-fusion",)),
    Bad("RL119", TINY, NO_LAYOUT, gpus=8),
    Bad("RL120", {}, ("--first-last-layers-bf16",)),
    Bad("RL121", {}, ("--fp8-param-gather",)),
    Bad("RL122", {"--fp8-recipe": "mxfp8"}, ("--overlap-param-gather",), gpu="b200", at="--fp8-param-gather"),
    Bad("RL201", {"--tensor-model-parallel-size": "16", "--num-query-groups": "16"}, severity="error",
        at="--tensor-model-parallel-size"),
    Bad("RL202", {"--num-attention-heads": "66", "--num-query-groups": "6"}, severity="error"),
    Bad("RL202", {"--num-query-groups": "2"}, severity="hint"),
    Bad("RL203", {}, ("--sequence-parallel",), severity="error", at="--tp-comm-overlap"),
    Bad("RL204", {}, ("--overlap-grad-reduce",), severity="error", at="--overlap-param-gather"),
    Bad("RL205", {"--tensor-model-parallel-size": "8"}, gpu="b200", at="--tensor-model-parallel-size"),
    Bad("RL206", {"--global-batch-size": "128"}, ("--num-layers-per-virtual-pipeline-stage",)),
    Bad("RL207", {"--num-layers-per-virtual-pipeline-stage": "3"}, severity="error"),
    Bad("RL207", {"--global-batch-size": "72"}, severity="error"),
    Bad("RL208", {"--context-parallel-size": "2"}, gpu="h200", at="--context-parallel-size"),
    Bad("RL209", {"--ddp-bucket-size": "100000"}, at="--ddp-bucket-size"),
    Bad("RL210", {}, ("--tp-comm-overlap",)),
    Bad("RL211", SMALL | {"--global-batch-size": "64"}, (*NO_LAYOUT, *OVERLAPS, "--grad-reduce-in-bf16")),
    Bad("RL212", MOE | {"--expert-model-parallel-size": "1"}, at="--num-experts"),
    Bad("RL213", MOE | {"--moe-token-dispatcher-type": "allgather"}, at="--moe-token-dispatcher-type"),
    Bad("RL214", MOE, ("--expert-tensor-parallel-size",)),
    Bad("RL215", {"--no-overlap-p2p-communication": None}, at="--no-overlap-p2p-communication"),
    Bad("RL216", {"--global-batch-size": "510"}, severity="error", at="--global-batch-size"),
    Bad("RL217", {}, gpus=60, severity="error"),
    Bad("RL218", {"--num-layers": "16", "--hidden-size": "4096", "--ffn-hidden-size": "14336",
                  "--num-attention-heads": "32"}),
    Bad("RL219", MOE, ("--overlap-moe-expert-parallel-comm",)),
    Bad("RL301", {"--recompute-granularity": "selective"}, at="--recompute-granularity"),
    Bad("RL302", {"--recompute-granularity": "selective", "--recompute-modules": "mlp"}, gpu="h200",
        at="--recompute-modules"),
    Bad("RL303", {"--micro-batch-size": "4"}, severity="error", at="--micro-batch-size"),
    Bad("RL304", env={"PYTORCH_CUDA_ALLOC_CONF": None}),
    Bad("RL305", FULL | {"--distribute-saved-activations": None}, severity="error"),
    Bad("RL306", FULL | {"--recompute-method": "block", "--recompute-num-layers": "8"}),
    Bad("RL307", {"--optimizer-cpu-offload": None}, at="--optimizer-cpu-offload"),
    Bad("RL308", {"--empty-unused-memory-level": "2"}, at="--empty-unused-memory-level"),
    Bad("RL309", FULL),
    Bad("RL310", {"--use-torch-fsdp2": None}, env={"CUDA_DEVICE_MAX_CONNECTIONS": None},
        at="--use-torch-fsdp2"),
    Bad("RL401", {"--log-interval": "1", "--log-params-norm": None}, at="--log-interval"),
    Bad("RL402", {"--timing-log-level": "2"}, at="--timing-log-level"),
    Bad("RL403", {"--save-interval": "500"}, ("--async-save",), at="--save-interval"),
    Bad("RL404", {"--num-workers": "0"}, at="--num-workers"),
    Bad("RL405", {}, ("--manual-gc", "--manual-gc-interval")),
    Bad("RL406", {}, ("--rerun-mode",)),
    Bad("RL407", {"--eval-iters": "100", "--eval-interval": "100"}, at="--eval-iters"),
    Bad("RL409", TINY, NO_LAYOUT, gpus=8),
    Bad("RL410", {"--profile": None}, at="--profile"),
    Bad("RL411", env={"CUDA_LAUNCH_BLOCKING": "1"}, severity="error", at="CUDA_LAUNCH_BLOCKING"),
    Bad("RL412", env={"OMP_NUM_THREADS": "128"}, at="OMP_NUM_THREADS"),
    Bad("RL413", {}, ("--log-throughput",)),
    Bad("RL414", {"--no-mmap-bin-files": None}, at="--no-mmap-bin-files"),
    Bad("RL501", env={"NCCL_NVLS_ENABLE": "0"}, at="NCCL_NVLS_ENABLE"),
    Bad("RL502", env={"NCCL_SOCKET_IFNAME": "lo"}, severity="error", at="NCCL_SOCKET_IFNAME"),
    Bad("RL503", env={"NCCL_IB_HCA": "mlx5_0"}, at="NCCL_IB_HCA"),
    Bad("RL504", env={"NCCL_PROTO": "LL"}, severity="warning", at="NCCL_PROTO"),
    Bad("RL505", env={"NCCL_ASYNC_ERROR_HANDLING": "1"}, at="NCCL_ASYNC_ERROR_HANDLING"),
    Bad("RL505", env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, severity="warning"),
    Bad("RL601", {"--overlap-grad-reduec": None}, severity="error", at="--overlap-grad-reduec"),
    Bad("RL602", {"--use-flash-attn": None}, at="--use-flash-attn"),
    Bad("RL602", {"--gradient-accumulation-fusion": None}, severity="error"),
    Bad("RL603", {"--fp16": None}, severity="error"),
    Bad("RL604", {"--min-lr": "1e-5 --min-lr 1e-6"}, at="--min-lr"),
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("good"), script())


def test_good_launch_has_no_findings(good: Case) -> None:
    found = [(each.id, each.evidence) for each in diagnose(good).findings]
    assert found == []


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.id}{'-' + next(iter(bad.change), '')}")
def test_spoiled_launch(bad: Bad, tmp_path: Path) -> None:
    text = script(bad.change, bad.without, bad.env)
    case = case_of(tmp_path, text, gpu=bad.gpu, gpus=bad.gpus)
    findings = [each for each in diagnose(case).findings if each.id == bad.id]
    assert findings, f"{bad.id} says nothing"
    if bad.severity:
        assert bad.severity in {each.severity for each in findings}
    if bad.at:
        lines = text.splitlines()
        assert any(each.line and bad.at in lines[each.line - 1] for each in findings), findings
    assert all(each.file == str(tmp_path / "run.sh") for each in findings)


def test_cut_off_flags(tmp_path: Path) -> None:
    """What bash takes for a command of its own is said, and the rest judged as if it were not cut off."""
    text = script().replace("ARGS=(\n", "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \\\n")
    text = text[: text.index(")\ntorchrun")].replace("\n  --", " \\\n  --").replace("\\ \\", "\\")
    whole = diagnose(case_of(tmp_path, text))
    assert whole.findings == () and whole.now is not None
    line = "  --bf16 \\\n"
    broken = diagnose(case_of(tmp_path, text.replace(line, "  # formats\n" + line)))
    (finding,) = broken.findings
    assert (finding.id, finding.severity) == ("RL605", "error") and finding.evidence.startswith("--bf16 ")
    assert finding.line == text[: text.index(line)].count("\n") + 2
    assert broken.now is not None and broken.now.step_s == whole.now.step_s
    windows = diagnose(case_of(tmp_path, text.replace("\n", "\r\n")))
    found = {finding.id: finding for finding in windows.findings}
    assert found["RL605"].evidence.startswith("--") and "end in CR LF" in found["RL603"].evidence
    assert "dos2unix" in found["RL603"].mend
    assert facts_of(broken.case)["precision"] == "fp32"  # as it stands


def test_compile_and_lengths(tmp_path: Path) -> None:
    text = script({"--use-torch-compile": None, "--variable-seq-lengths": None})
    assert "RL408" in ids(case_of(tmp_path, text, dialect="redline"))
    assert "RL408" not in ids(case_of(tmp_path, script({"--use-torch-compile": None}), dialect="redline"))


def launched(folder: Path, gpus: int, flags: str) -> dict[str, Any]:
    """What a launch of `redline train` that waits for its host is told to change."""
    text = (
        "python pretrain_gpt.py --mock-data --vocab-size 32000 --num-layers 16 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --global-batch-size 64 "
        f"--train-iters 10 --bf16 {flags}\n"
    )
    found = diagnose(case_of(folder, text, gpus=gpus, dialect="redline")).findings
    return dict(next(finding for finding in found if finding.id == "RL409").change.values)


def test_a_host_that_is_waited_for_is_advised_what_the_rules_obey(tmp_path: Path) -> None:
    """Compile first, selective recompute too, then record, which several ranks cannot."""
    both = {"use_torch_compile": True, "cuda_graph_impl": "local"}
    assert launched(tmp_path, 1, "").items() <= both.items()
    assert launched(tmp_path, 1, "--use-torch-compile") == {"cuda_graph_impl": "local"}
    assert launched(tmp_path, 8, "--use-distributed-optimizer") == {"use_torch_compile": True}
    assert launched(tmp_path, 8, "--use-distributed-optimizer --use-torch-compile") == {}
    selective = "--recompute-granularity selective --recompute-modules core_attn"
    assert launched(tmp_path, 1, selective) == launched(tmp_path, 1, "")


H100 = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    power_limit_w=700,
    power_default_w=700,
    clock_limit_mhz=1980,
    clock_max_mhz=1980,
    ecc=True,
    ecc_uncorrected=0,
    remap_pending=False,
    pcie_width=16,
    pcie_width_max=16,
    nvlinks=18,
    nvlinks_active=18,
)
HEALTHY = Machine(
    gpus=(H100,),
    nearest_card={0: "PIX"},
    links=(Pair(0, 1, "NV18"),),
    nics=(Nic("mlx5_0:1", "infiniband", "4: ACTIVE", 400.0),),
    numa_nodes=2,
    bound_to_node=True,
    governor="performance",
    packages={"torch": "2.11", "triton": "3.6"},
    nccl=NcclLog("2.27", "IB", "Using network IB", {"P2P": 8}),
    measured={"gemm": 700e12, "copy": 2.6e12, "all_reduce": 330e9},
)
SICK: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RL009", {"nccl": NcclLog("2.27", "Socket", "NET/Socket : Using eth0", {})}),
    ("RL009", {"nccl": NcclLog("2.27", "IB", "", {"SHM": 8})}),
    ("RL506", {"links": (Pair(0, 1, "SYS"),)}),
    ("RL507", {"bound_to_node": False}),
    ("RL508", {"gpus": (replace(H100, power_limit_w=500),)}),
    ("RL508", {"gpus": (replace(H100, clock_limit_mhz=1200),)}),
    ("RL508", {"gpus": (replace(H100, throttled=("hardware thermal slowdown",)),)}),
    ("RL509", {"gpus": (replace(H100, ecc_uncorrected=2),)}),
    ("RL509", {"gpus": (replace(H100, remap_pending=True),)}),
    ("RL509", {"xids": ("NVRM: Xid (PCI:0000:1b:00): 79",)}),
    ("RL510", {"governor": "powersave"}),
    ("RL511", {"gpus": (replace(H100, pcie_width=8),)}),
    ("RL512", {"gpus": (replace(H100, processes=1),)}),
    ("RL513", {"nics": (Nic("mlx5_0:1", "infiniband", "1: DOWN"),)}),
    ("RL514", {"packages": {"torch": "2.11", "triton": None}}),
    ("RL515", {"gpus": (replace(H100, nvlinks_active=17),)}),
    ("RL516", {"measured": {"gemm": 400e12}}),
    ("RL516", {"measured": {"copy": 1e12}}),
    ("RL516", {"measured": {"all_reduce": 100e9}}),
    ("RL518", {"nearest_card": {0: "PIX", 1: "SYS"}}),
    ("RL517", {"nics": (Nic("mlx5_0:1", "infiniband", "4: ACTIVE", 100.0),)}),
)


def test_healthy_machine_has_no_findings() -> None:
    assert ids(Case(machine=HEALTHY, hardware=hardware_named("h100"))) == []


@pytest.mark.parametrize(("id", "change"), SICK, ids=[f"{id}-{next(iter(change))}" for id, change in SICK])
def test_sick_machine(id: str, change: dict[str, Any]) -> None:
    assert id in ids(Case(machine=replace(HEALTHY, **change), hardware=hardware_named("h100")))


RUN = RunRecord(steps=100, step_s=1.0, tokens_per_s=1e5, mfu=0.55, memory_bytes=60 << 30)
BAD_RUNS = (
    ("RL702", {"slow_steps": (20, 40, 60), "slow_period": 20, "lost_share": 0.1}),
    ("RL703", {"skipped_steps": 5}),
    ("RL704", {"mfu": 0.2}),
    ("RL705", {"memory_bytes": 20 << 30}),
    ("RL705", {"predicted_memory": 30 << 30}),
)


def test_good_run_has_no_findings() -> None:
    assert ids(Case(run=RUN, hardware=hardware_named("h100"))) == []


@pytest.mark.parametrize(("id", "change"), BAD_RUNS)
def test_bad_run(id: str, change: dict[str, Any]) -> None:
    assert id in ids(Case(run=replace(RUN, **change), hardware=hardware_named("h100")))


def test_run_below_prediction(tmp_path: Path) -> None:
    case = case_of(tmp_path, script())
    assert case.cost is not None
    slow = replace(RUN, step_s=2 * case.cost.step_s, mfu=0.3)
    found = {each.id: each for each in diagnose(replace(case, run=slow)).findings}
    assert found["RL701"].gain.step_time == pytest.approx(0.5)
    assert "unexplained 50%" in found["RL704"].evidence
    as_predicted = replace(RUN, step_s=case.cost.step_s)
    assert "RL701" not in ids(replace(case, run=as_predicted))


def test_every_check_has_a_failing_case() -> None:
    failing = (
        {bad.id for bad in BAD}
        | {id for id, _ in SICK}
        | {id for id, _ in BAD_RUNS}
        | {"RL408", "RL605", "RL701"}
    )
    assert failing == {each.id for each in CHECKS}
    assert len({each.id for each in CHECKS}) == len(CHECKS)


def test_one_queue_depends_on_the_gpu_and_the_layout(tmp_path: Path) -> None:
    """W09: not needed on Blackwell, with expert overlap, or without tp and cp; and 1 is then spoken of."""
    unset: dict[str, str | None] = {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    assert "RL008" not in ids(case_of(tmp_path, script(env=unset), gpu="b200"))
    assert "RL008" not in ids(case_of(tmp_path, script(MOE, env=unset)))
    assert "RL008" not in ids(case_of(tmp_path, script(SMALL, NO_LAYOUT, unset), gpus=8))
    found = {each.id: each for each in diagnose(case_of(tmp_path, script(), gpu="b200")).findings}
    assert found["RL008"].severity == "hint" and "Blackwell" in found["RL008"].why
    assert not found["RL008"].change.acts
    found = {each.id: each for each in diagnose(case_of(tmp_path, script(MOE))).findings}
    assert found["RL008"].change.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert "RL008" in ids(
        case_of(tmp_path, script(SMALL | {"--context-parallel-size": "2"}, NO_LAYOUT, unset), gpus=8)
    )


def test_good_flags_are_all_understood(good: Case) -> None:
    assert good.launch is not None
    assert {use.flag for use in good.launch.flags} == set(GOOD)
    assert {use.state for use in good.launch.flags} <= {"understood", "megatron-only"}
    json.dumps([each.as_dict() for each in diagnose(good).findings], allow_nan=False)


def ids(case: Case) -> list[str]:
    return [each.id for each in diagnose(case).findings]
