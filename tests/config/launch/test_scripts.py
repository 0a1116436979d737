"""Launch scripts in the manner of public ones of different origin, each with the facts that it states.

The scripts lie in scripts/; reading them runs nothing. Every flag of every one is attributed: to a field of
the tree, or to a name that Megatron or a fork has. The number of flags of each was counted once by running it
under bash with programs that only print their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from redline.config import value_of
from redline.config.launch import Launch, read_launch

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Facts:
    """What a script states; `values` by field name, `open` the fields that it leaves open."""

    script: str
    world: tuple[int | None, int | None, int | None]  # world size, nodes, processes a node
    launcher: str
    entry: str
    values: Mapping[str, Any]
    count: int  # flags after the program
    sets: Mapping[str, str] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    asks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # assumption -> its choices


def layout(tp: int, pp: int, layers: int, hidden: int, micro: int, batch: int | None) -> dict[str, Any]:
    """The six numbers that every script states."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers": layers,
        "hidden_size": hidden,
        "micro_batch_size": micro,
        "global_batch_size": batch,
    }


SIZES = {
    "MODEL_SIZE": "8B",
    "ENV": "dsw",
    "TP": "2",
    "PP": "1",
    "BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "256",
}
RECIPE = {
    "PR": "fp8",
    "AC": "full",
    "DO": "true",
    "SP": "true",
    "FL": "false",
    "SEQ_LEN": "4096",
    "LR": "1e-5",
}
TOKENS = {"TRAIN_TOKENS": "1048576000", "WARMUP_TOKENS": "10485760"}

CASES = [
    Facts(
        "llama3_8b_fp8.sh",
        (8, 1, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(1, 1, 32, 4096, 1, 128)
        | {
            "fp8_format": "hybrid",
            "fp8_amax_history_len": 1024,
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "mock_data": True,
            "split": "99,1,0",
            "save": "runs/llama3_8b_fp8",
            "attention_backend": "fused",
        },
        71,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Facts(
        "gpt3_175b.sh",
        (128, 16, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(8, 16, 96, 12288, 1, 1536) | {"rampup_batch_size": (16, 16, 5859375), "fp16": True},
        34,
        asks={"DATA_PATH": (), "CHECKPOINT_PATH": ()},
    ),
    Facts(
        "mixtral_8x7b.sh",
        (32, 4, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(1, 4, 32, 4096, 1, 256)
        | {"num_experts": 8, "expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"},
        56,
    ),
    Facts(
        "gpt_2021_with_mp.sh",
        (8, 1, 8),
        "torch.distributed.launch",
        "pretrain_gpt.py",
        layout(2, 2, 24, 1024, 4, 16) | {"fp16": True, "recompute_granularity": "full"},
        32,
    ),
    Facts(
        "sc21/figure.sh",
        (64, 8, 8),
        "srun",
        "pretrain_gpt.py",
        layout(8, 8, 24, 20480, 1, 128)
        | {"recompute_granularity": "full", "recompute_method": "uniform", "loss_scale": 8192.0},
        26,
        asks={"SLURM_NNODES": ("8",), "SLURM_NTASKS_PER_NODE": ("8",)},
    ),
    Facts(
        "deepseek_v3_heredoc.sh",
        (256, 32, 8),
        "srun",
        "pretrain_gpt.py",
        layout(1, 1, 61, 7168, 4, 2048)
        | {
            "num_experts": 256,
            "moe_layer_freq": "[0]*3+[1]*58",
            "recompute_modules": ("mlp", "moe", "mla_up_proj", "layernorm"),
            "use_megatron_fsdp": True,
            "mtp_num_layers": 1,
            "wandb_exp_name": "DeepSeek-V3-TP1EP8-MBS4GBS2048-selective-recompute",
        },
        69,
        environment={"NCCL_IB_SL": "1"},
    ),
    Facts(
        "pai_llama3_1.sh",
        (None, None, None),
        "torchrun",
        "pretrain_llama.py",
        {"group_query_attention": True, "num_query_groups": 8, "transformer_impl": "transformer_engine"},
        63,
        open=frozenset(
            {"num_layers", "hidden_size", "fp8_format", "recompute_granularity", "sequence_parallel"}
        ),
        asks={
            "MODEL_SIZE": ("8B", "70B"),
            "PR": ("fp16", "bf16", "fp8"),
            "AC": ("full", "sel", "none"),
            "ENV": ("dsw", "dlc"),
        },
    ),
    Facts(
        "pai_llama3_1.sh",
        (8, 1, 8),
        "torchrun",
        "pretrain_llama.py",
        layout(2, 1, 32, 4096, 1, 256)
        | {
            "bf16": True,
            "fp8_format": "hybrid",
            "recompute_granularity": "full",
            "recompute_num_layers": 1,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "train_iters": 1000,
            "lr_warmup_iters": 10,
        },
        60,
        sets=SIZES | RECIPE | TOKENS,
        environment={"NVTE_FUSED_ATTN": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    ),
    Facts(
        "bloom_176b.slurm",
        (384, 48, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(4, 12, 70, 14336, 2, 2048)
        | {"rampup_batch_size": (192, 16, 9765625), "train_samples": 220000000, "padded_vocab_size": 250880},
        52,
        environment={"CUDA_LAUNCH_BLOCKING": "1"},
        asks={"SLURM_NNODES": ("48",)},
    ),
    Facts(
        "apertus_8b.sbatch",
        (256, 64, 4),
        "srun",
        "pretrain_gpt.py",
        layout(2, 1, 32, 4096, 1, 1024)
        | {"sequence_parallel": True, "use_precision_aware_optimizer": True, "mock_data": True},
        72,
        environment={"OMP_NUM_THREADS": "18", "WORLD_SIZE": "256"},
        asks={"AUTO_JOB_REQUEUE": ("true",), "SLURM_NNODES": ("64",)},
    ),
    Facts(
        "lumi_7b.slurm",
        (1024, 128, 8),
        "srun",
        "pretrain_gpt.py",
        layout(2, 1, 32, 4096, 1, 1024)
        | {
            "train_samples": 488281250,
            "lr_warmup_samples": 2048000,
            "train_data_path": ("0.3", "data/fi_text_document", "0.7", "data/en_text_document"),
        },
        48,
        environment={"NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3"},
    ),
    Facts(
        "megatron_deepspeed_13b.sh",
        (32, 4, 8),
        "deepspeed",
        "pretrain_gpt.py",
        layout(2, 4, 40, 5120, 1, 256) | {"recompute_granularity": "full", "num_query_groups": 40},
        48,
    ),
    Facts(
        "azure_52b.sh",
        (128, 8, 16),
        "deepspeed",
        "pretrain_gpt.py",
        layout(4, 16, 64, 8192, 4, 1024) | {"loss_scale": 12.0},
        32,
    ),
    Facts(
        "starcoder_15b.slurm",
        (512, 64, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(4, 4, 40, 6144, 1, 512) | {"seq_length": 8192, "use_distributed_optimizer": True},
        43,
        environment={"NCCL_IB_DISABLE": "1", "FI_PROVIDER": "efa"},
    ),
    Facts(
        "k2/launch.sh",
        (480, 60, 8),
        "srun",
        "pretrain_gpt.py",
        layout(8, 4, 80, 8192, 1, 510) | {"num_layers_per_virtual_pipeline_stage": 5},
        28,
        environment={"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5_0,mlx5_1"},
    ),
    Facts(
        "flagscale_host.sh",
        (32, 4, 8),
        "torchrun",
        "train_gpt.py",
        layout(4, 2, 48, 6144, 2, 1024) | {"train_samples": 976562},
        39,
        environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    ),
    Facts(
        "nemo_overrides.sh",
        (16, 2, 8),
        "torchrun",
        "megatron_gpt_pretraining.py",
        layout(2, 1, 32, 4096, 4, 256) | {"sequence_parallel": True, "normalization": "RMSNorm"},
        15,
    ),
    Facts(
        "mpi_llama3.sh",
        (16, 2, 8),
        "mpirun",
        "pretrain_gpt.py",
        layout(8, 2, 80, 8192, 1, 64) | {"recompute_method": "block", "recompute_num_layers": 4},
        29,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_IB_DISABLE": "0"},
    ),
    Facts(
        "mindspeed_qwen.sh",
        (8, 1, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(1, 4, 28, 3584, 1, 128) | {"add_qkv_bias": True, "padded_vocab_size": 152064},
        54,
    ),
    Facts(
        "rocm_llama2.sh",
        (None, 1, None),
        "torchrun",
        "pretrain_gpt.py",
        layout(8, 1, 80, 8192, 2, 8) | {"num_query_groups": 8, "optimizer": "sgd", "sequence_parallel": True},
        37,
        asks={"GPUS_PER_NODE": ()},
    ),
    Facts(
        "rocm_llama2.sh",
        (4, 1, 4),
        "torchrun",
        "pretrain_gpt.py",
        layout(4, 1, 32, 4096, 2, 8) | {"fp8_format": "hybrid", "fp8_margin": 0, "optimizer": "adam"},
        39,
        sets={"GPUS_PER_NODE": "4", "TP": "4", "MODEL_SIZE": "7", "TE_FP8": "1", "OPTIMIZER": "adam"},
    ),
    Facts(
        "k8s_pytorchjob.sh",
        (None, None, 8),
        "torchrun",
        "megatron.training.pretrain_gpt",
        layout(1, 1, 16, 2048, 2, 512)
        | {"num_attention_heads": 32, "save": "/ckpt/llama", "wandb_exp_name": "run of llama"},
        22,
        environment={"NCCL_NVLS_ENABLE": "0"},
        asks={"PET_NNODES": ()},
    ),
    Facts(
        "k8s_pytorchjob.sh",
        (32, 4, 8),
        "torchrun",
        "megatron.training.pretrain_gpt",
        layout(2, 1, 28, 3072, 2, 512) | {"num_attention_heads": 24, "save": "/ckpt/llama-3b"},
        23,
        sets={
            "PET_NNODES": "4",
            "MODEL": "llama-3b",
            "RUN_ID": "llama-3b",
            "@": "--tensor-model-parallel-size 2",
        },
    ),
    Facts(
        "sweep.sh",
        (8, 1, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(1, 1, 24, 2048, 4, 64) | {"tensorboard_dir": "tb/tp1_pp1"},
        16,
        asks={"tp": ("1", "2", "4"), "pp": ("1", "2")},
    ),
    Facts(
        "sweep.sh",
        (8, 1, 8),
        "torchrun",
        "pretrain_gpt.py",
        layout(4, 2, 24, 2048, 4, 64),
        16,
        sets={"tp": "4", "pp": "2"},
    ),
    Facts(
        "ssh_hosts.sh",
        (8, 2, 4),
        "torchrun",
        "pretrain_gpt.py",
        layout(1, 1, 12, 768, 8, None),
        10,
        environment={"NCCL_SOCKET_IFNAME": "eth0"},
    ),
    Facts(
        "accelerate_1b.sh",
        (32, 4, 8),
        "accelerate",
        "pretrain_gpt.py",
        layout(1, 1, 16, 2048, 8, 512),
        13,
        environment={"OMP_NUM_THREADS": "8"},
    ),
]


def read(facts: Facts) -> Launch:
    return read_launch(SCRIPTS / facts.script, set_values=facts.sets)


def name(facts: Facts) -> str:
    return facts.script + ("" if not facts.sets else f" with {len(facts.sets)} set")


@pytest.mark.parametrize("facts", CASES, ids=name)
def test_facts(facts: Facts) -> None:
    launch = read(facts)
    assert (launch.world_size, launch.nnodes, launch.nproc_per_node) == facts.world
    assert (launch.launcher, launch.entry, launch.kind) == (facts.launcher, facts.entry, "bash")
    assert {key: value_of(launch.config, key) for key in facts.values} == dict(facts.values)
    assert len(launch.flags) == facts.count
    assert facts.open <= launch.open_fields
    assert {key: launch.environment[key][0] for key in facts.environment} == dict(facts.environment)
    found = {assumption.name: assumption.choices for assumption in launch.assumptions}
    assert {key: found[key] for key in facts.asks} == dict(facts.asks)


@pytest.mark.parametrize("facts", CASES, ids=name)
def test_every_flag_is_attributed_to_its_line(facts: Facts) -> None:
    launch = read(facts)
    unknown = [use.flag for use in launch.flags if use.state == "unknown"]
    assert not unknown
    for use in launch.flags:
        if use.flag in facts.sets.get("@", ""):
            continue
        line = use.file.read_text().splitlines()[use.line - 1]
        assert use.flag in line, f"{use.flag} is said to stand in line {use.line}: {line}"


def test_there_are_enough_of_them() -> None:
    assert len({facts.script for facts in CASES}) >= 20


def test_a_fragment_is_read_for_its_flags() -> None:
    launch = read_launch(SCRIPTS / "fragment.sh")
    assert launch.entry is None
    assert launch.world_size is None
    assert value_of(launch.config, "num_layers") == 32
    assert value_of(launch.config, "lr") == 3e-4


def test_a_set_that_fits_nothing_is_a_problem() -> None:
    launch = read_launch(SCRIPTS / "sweep.sh", set_values={"TTP": "2"})
    assert any(problem.rule == "set-without-effect" for problem in launch.problems)
