"""No option is ignored: set to another value, each changes something that can be seen, or is refused by name.

An active option has a probe below: what is looked at, and beside which other options. Options that are
refused or built in, and every --no-x and --disable-x, are held to their word in tests/config
(test_refusals.py, test_options.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from redline.build import open_device
from redline.config import (
    UNSET,
    Environment,
    InvalidConfigError,
    Option,
    RuntimeConfig,
    needed_by,
    options,
    parse_args,
)
from redline.config.model import REQUIRED_FIELDS
from redline.data import IndexedWriter
from redline.data.tokenizer import save_tokenizer, train_bpe

from . import observe
from .tiny import TINY_VALUES, Values, opened, take_steps, words_of

REFUSAL = re.compile(r"\w+Error: ")
ACTIVE = {option.field: option for option in options() if option.state == "active"}
PLACE = "@"  # stands for the folder of `places` in a value


@dataclass(frozen=True)
class Probe:
    """How an option shows.

    Attributes:
        look: one of observe.py.
        given: other options, in both runs, over those of the tiny run; a default takes one away.
        value: of the option in the second run; UNSET takes the tree's `another_value()`.
        instead: further options of the second run, where the option excludes or needs them.
        refused: the runs that do not begin: 1, 2, or none.
    """

    look: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    value: Any = UNSET
    instead: Mapping[str, Any] = field(default_factory=dict)
    refused: int | None = None


def see(
    look: Any, value: Any = UNSET, instead: Values | None = None, refused: int | None = None, **given: Any
) -> Probe:
    return Probe(look, given, value, instead or {}, refused)


def numbers(*names: str, **given: Any) -> dict[str, Probe]:
    return {name: see(observe.numbers, **given) for name in names}


FILE = {"mock_data": False, "data_path": ("@data/a",)}
DOCUMENTS = {**FILE, "tokenizer_type": "NullTokenizer", "vocab_size": 100}
SAMPLES = {"train_iters": None, "train_samples": 24}
CUSTOM = {"vocab_size": 1000}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}
TRACED = {"use_pytorch_profiler": True, "profile_step_start": 1}
BROKEN = {"init_method_std": 1e30}
RESUMED = {"load": "@run", "train_iters": 5}
OTHER_SCHEDULE = {**RESUMED, "lr_decay_style": "cosine"}
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
FP16 = {"fp16": True, "loss_scale": None}

MODEL = {
    "preset": see(observe.plan, instead={name: ACTIVE[name].default for name in REQUIRED_FIELDS}),
    **numbers(
        "num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "max_position_embeddings",
        "vocab_size", "activation_func", "normalization", "norm_epsilon", "apply_layernorm_1p",
        "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling",
        "rope_scaling_factor", "untie_embeddings_and_output_weights", "add_bias_linear", "add_qkv_bias",
        "qk_layernorm", "qk_l2_norm", "hidden_dropout", "attention_dropout", "init_method_std",
        "embedding_init_method_std", "softmax_scale", "attn_logit_softcapping",
        "softmax_type", "activation_func_clamp_value", "glu_linear_offset",
    ),
    "num_attention_heads": see(observe.numbers, value=2),
    "window_size": see(observe.numbers, value=(3, 0)),
    "group_query_attention": see(observe.numbers, instead={"num_query_groups": 2}),
    "num_query_groups": see(observe.numbers, num_query_groups=1),
    # The numbers do not depend on padding; the stored matrices and their memory do.
    "pad_vocab_size": see(observe.plan),
    "make_vocab_size_divisible_by": see(observe.plan),
    "padded_vocab_size": see(observe.plan),
}  # fmt: skip
DATA = {
    "data_path": see(observe.data, value=("@data/a",), instead={"mock_data": False}),
    "mock_data": see(observe.data, value=False, instead={"data_path": ("@data/a",)}),
    "train_data_path": see(observe.data, value=("@data/b",), mock_data=False, train_data_path=("@data/a",)),
    "valid_data_path": see(observe.data, value=("@data/b",), mock_data=False, train_data_path=("@data/a",)),
    "test_data_path": see(observe.outcome, value=("@data/b",), mock_data=False, train_data_path=("@data/a",)),
    "split": see(observe.data, **FILE),
    "data_cache_path": see(observe.outcome, value="indices", **FILE),
    "mmap_bin_files": see(observe.process, **FILE),
    "num_workers": see(observe.process),
    "dataloader_type": see(observe.data),
    "reset_position_ids": see(observe.data, **DOCUMENTS),
    "reset_attention_mask": see(observe.data, **DOCUMENTS),
    "eod_mask_loss": see(observe.data, **DOCUMENTS),
    "packing": see(observe.data),
    "dataloader_inter_document_masking": see(observe.data),
}
TOKENIZER = {
    "tokenizer_type": see(observe.vocabulary, **CUSTOM),
    "tokenizer_model": see(observe.vocabulary, value="@tokenizer.json", **CUSTOM),
    "vocab_file": see(
        observe.vocabulary, value="@vocab.json", instead={"merge_file": "@merges.txt"}, **CUSTOM
    ),
    "merge_file": see(observe.vocabulary, refused=1, value="@merges.txt", vocab_file="@vocab.json", **CUSTOM),
    "eod_token": see(observe.vocabulary, value="e", tokenizer_model="@tokenizer.json", **CUSTOM),
}
TRAIN = {
    **numbers("train_iters", "seed", "z_loss"),
    "seq_length": see(observe.numbers, value=24),
    "micro_batch_size": see(observe.plan, value=1),
    "global_batch_size": see(observe.numbers, value=8),
    "rampup_batch_size": see(observe.numbers, micro_batch_size=1),
    "step_batch_size_schedule": see(
        observe.numbers, value="0:2 100:4", instead={"global_batch_size": None}, global_batch_size=2
    ),
    "train_samples": see(observe.numbers, instead={"train_iters": None}),
    "eval_iters": see(observe.numbers, value=3),
    "eval_interval": see(observe.outcome, eval_iters=2),
    "exit_interval": see(observe.outcome),
    "exit_duration_in_mins": see(observe.outcome, value=1e-6),
    "exit_signal_handler": see(observe.process),
    "deterministic_mode": see(observe.process),
    "check_for_nan_in_loss_and_grad": see(observe.numbers, refused=1, **BROKEN),
    "nonfinite_action": see(observe.numbers, refused=1, **BROKEN),
    "manual_gc": see(observe.process),
    "manual_gc_interval": see(observe.process, value=2),
    "empty_unused_memory_level": see(observe.choices, refused=2),  # a CPU refuses it; for a GPU see below
}
OPTIM = {
    **numbers(
        "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction",
        "decoupled_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps",
    ),
    **numbers("lr_decay_samples", "lr_warmup_samples", **SAMPLES),
    **numbers("lr_wsd_decay_style", "lr_wsd_decay_iters", **WSD),
    "lr_warmup_init": see(observe.numbers, lr_warmup_iters=2),
    "lr_wsd_decay_samples": see(observe.numbers, value=12, lr_wsd_decay_samples=8, **SAMPLES),
    "decoupled_min_lr": see(observe.numbers, decoupled_lr=1e-4),
    "start_weight_decay": see(observe.numbers, start_weight_decay=0.1, end_weight_decay=0.2),
    "end_weight_decay": see(observe.numbers, start_weight_decay=0.1, end_weight_decay=0.2),
    "weight_decay_incr_style": see(
        observe.numbers, instead={"start_weight_decay": 0.0, "end_weight_decay": 0.2}
    ),
    **numbers("loss_scale", "initial_loss_scale", "hysteresis", **FP16),
    "min_loss_scale": see(observe.numbers, value=2.0**32, nonfinite_action="skip", **FP16),
    "loss_scale_window": see(observe.numbers, value=2, **{**FP16, "initial_loss_scale": 1024.0}),
    "use_precision_aware_optimizer": see(observe.plan, bf16=True),
    "main_grads_dtype": see(observe.numbers, **AWARE),
    "exp_avg_dtype": see(observe.numbers, value="bf16", **AWARE),
    "exp_avg_sq_dtype": see(observe.numbers, value="bf16", **AWARE),
    # Where states are changes no number, and on a CPU no byte; test_optimizer_storage.py follows them there.
    "optimizer_cpu_offload": see(observe.plan),
    "optimizer_offload_fraction": see(observe.plan, optimizer_cpu_offload=True),
    "overlap_cpu_optimizer_d2h_h2d": see(observe.plan, optimizer_cpu_offload=True),
    "override_opt_param_scheduler": see(observe.choices, **OTHER_SCHEDULE),
    "use_checkpoint_opt_param_scheduler": see(observe.numbers, **OTHER_SCHEDULE),
}  # fmt: skip
CHECKPOINT = {
    "save": see(observe.outcome, save=None),
    "load": see(observe.numbers, value="@run"),
    "save_interval": see(observe.outcome),
    "keep_checkpoints": see(observe.outcome, save_interval=1),
    "async_save": see(observe.process),
    "ckpt_step": see(observe.numbers, **RESUMED),
    "save_optim": see(observe.outcome),
    "load_optim": see(observe.numbers, **RESUMED),
    "finetune": see(observe.numbers, **RESUMED),
    "pretrained_checkpoint": see(observe.numbers, value="@run"),
    "use_checkpoint_args": see(observe.numbers, refused=1, load="@rms"),
    "exit_on_missing_checkpoint": see(observe.choices, refused=2, load="@nothing"),
}
LOGGING = {
    "log_interval": see(observe.outcome, value=2),
    "tensorboard_dir": see(observe.outcome),
    "tensorboard_log_interval": see(observe.outcome),
    "log_throughput": see(observe.outcome),
    "log_params_norm": see(observe.outcome),
    "log_num_zeros_in_grad": see(observe.outcome),
    "log_progress": see(observe.outcome),
    "log_straggler": see(observe.outcome),
    "straggler_minmax_count": see(observe.compared, value=2),
    "throughput_drop": see(observe.sinks),
    "profile_ledger": see(observe.outcome, value=True),
    "ledger_interval": see(observe.outcome, value=2, train_iters=9),
    "profile": see(observe.outcome, refused=2),  # for Nsight: a CPU has nothing to show there
    "profile_step_start": see(
        observe.outcome, value=2, profile_step_start=1, profile_step_end=4, use_pytorch_profiler=True
    ),
    "profile_step_end": see(observe.outcome, value=4, **TRACED),
    "profile_ranks": see(observe.outcome, refused=2, value=(1,), **TRACED),
    "use_pytorch_profiler": see(observe.outcome, refused=1, profile_step_start=1),
    "nvtx_ranges": see(observe.gpu_tools, profile_step_start=1),
    "record_memory_history": see(observe.outcome, refused=2),
    "memory_snapshot_path": see(observe.gpu_tools),
    "wandb_project": see(observe.sinks),
    "wandb_exp_name": see(observe.sinks),
    "wandb_save_dir": see(observe.sinks),
    "wandb_entity": see(observe.sinks),
    "prometheus_port": see(observe.sinks),
    "prometheus_address": see(observe.sinks),
}
OVERLAPPED = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}
WIDE_SUM = {"bf16": True, "grad_reduce_in_bf16": True, "use_distributed_optimizer": True}
RANKS = {
    "tp_comm_overlap": see(observe.ranks, tensor_model_parallel_size=2, sequence_parallel=True),
    "tp_comm_overlap_method": see(observe.ranks, value="plain", **OVERLAPPED),
    "tp_comm_overlap_chunks": see(observe.ranks, value=3, **OVERLAPPED),
    **{
        f"tp_comm_{name}": see(observe.ranks, **OVERLAPPED)
        for name in ("overlap_ag", "overlap_rs", "bulk_wgrad", "bulk_dgrad", "overlap_rs_dgrad")
    },
    "tensor_model_parallel_size": see(observe.ranks, value=2),
    "sequence_parallel": see(observe.ranks, tensor_model_parallel_size=2),
    "distributed_backend": see(observe.choices, value="nccl", refused=2),
    "distributed_timeout_minutes": see(observe.ranks),
    "hang_timeout_seconds": see(observe.ranks),
    "startup_timeout_minutes": see(observe.ranks),
    "use_distributed_optimizer": see(observe.ranks),
    "num_distributed_optimizer_instances": see(observe.ranks, value=2, use_distributed_optimizer=True),
    "overlap_grad_reduce": see(observe.ranks, value=False),
    "overlap_param_gather": see(observe.ranks, value=False, use_distributed_optimizer=True),
    "ddp_bucket_size": see(observe.ranks, value=3000),
    "ddp_num_buckets": see(observe.ranks, value=3),
    "ddp_pad_buckets_for_high_nccl_busbw": see(observe.layout, use_distributed_optimizer=True),
    "ddp_reduce_scatter_with_fp32_accumulation": see(observe.ranks, **WIDE_SUM),
    "flight_recorder_dump_path": see(observe.ranks, value="record"),
    "nproc_per_node": see(observe.launched),
    "max_restarts": see(observe.launched),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# The numbers stay the same bit for bit; the plan says what is dropped, and how much memory is left.
RECOMPUTE = {
    "recompute": see(observe.plan),
    "memory_budget": see(observe.plan),
    "cpu_offloading": see(observe.plan, instead={"cpu_offloading_num_layers": 2}),
    "cpu_offloading_num_layers": see(observe.plan, value=2, cpu_offloading=True, cpu_offloading_num_layers=1),
    "recompute_granularity": see(observe.plan, value="selective"),
    "recompute_modules": see(observe.plan),
    "recompute_method": see(observe.plan, value="block", **FULL),
    "recompute_num_layers": see(observe.plan, value=2, **FULL),
    "distribute_saved_activations": see(observe.ranks, **FULL, tensor_model_parallel_size=2),
}
# A kernel asked for by name on a CPU is refused with the reason; test_fused_run.py lets them run.
FUSIONS = {
    name: see(observe.choices, refused=2, **given)
    for name, given in {
        "bias_gelu_fusion": {},
        "bias_swiglu_fusion": {"activation_func": "swiglu"},
        "bias_dropout_fusion": {},
        "masked_softmax_fusion": {"attention_backend": "unfused"},
        "rope_fusion": {"position_embedding_type": "rope"},
        "persist_layer_norm": {},
        "fused_residual_rmsnorm": {"normalization": "RMSNorm"},
        "embedding_fusion": {},
        "adamw_fusion": {},
        "grad_norm_fusion": {},
        "cross_entropy_loss_fusion": {},
        "cross_entropy_fusion_impl": {},
    }.items()
}
OTHERS = {
    **numbers("bf16", "fp16", "fp64", "grad_reduce_in_bf16"),
    "fp32": see(observe.choices),  # what a CPU takes anyway: the summary says that it was asked for
    "attention_backend": see(observe.choices, attention_dropout=0.0),
    # On a CPU no package of any version runs, and the start says so.
    "flash_attention_version": see(
        observe.choices, refused=2, attention_backend="flash", attention_dropout=0.0
    ),
    "transformer_impl": see(observe.choices, value="local"),
    "gradient_accumulation_fusion": see(observe.numbers, bf16=True),
    "use_torch_compile": see(observe.choices),
    # A CPU has none; on a GPU tests/step/test_graph.py looks.
    "cuda_graph_impl": see(observe.choices, refused=2, value="local"),
    "cuda_graph_warmup_steps": see(observe.choices, refused=2, value=2, cuda_graph_impl="none"),
    "device": see(observe.choices, device="auto"),
    "threads": see(observe.process, threads=None, train_iters=1, eval_iters=0),
}
FP8_MODEL = {"fp8_format": "hybrid", "train_iters": 4}
FP8 = {
    "fp8_format": see(observe.numbers, **{**FP8_MODEL, "fp8_format": None, "bf16": True}),
    "fp8_recipe": see(observe.numbers, value="tensorwise", **FP8_MODEL),
    **numbers("fp8_margin", "fp8_interval", "fp8_wgrad", "fp8_keep_bf16", **FP8_MODEL),
    "fp8_emulate": see(observe.choices, fp8_recipe="blockwise", hidden_size=128, **FP8_MODEL),
    "fp8_stats_interval": see(observe.outcome, value=2, **FP8_MODEL),
    "fp8_return_to_bf16": see(observe.numbers, value=1, **FP8_MODEL, fp8_interval=100),
    "fp8_output_proj": see(observe.numbers, **FP8_MODEL),
    "fp8_amax_history_len": see(observe.numbers, value=1, **FP8_MODEL),
    "fp8_amax_compute_algo": see(observe.numbers, **FP8_MODEL),
    "fp8_param_gather": see(observe.plan, value=False, **FP8_MODEL),
    "keep_fp8_transpose_cache": see(observe.plan, **FP8_MODEL),
    "parameter_transpose_cache": see(observe.plan, fp8_param_gather=False, **FP8_MODEL),
    **numbers("first_last_layers_bf16", **{**FP8_MODEL, "num_layers": 3}),
    **numbers(
        "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        **{**FP8_MODEL, "num_layers": 4, "first_last_layers_bf16": True},
    ),
}  # fmt: skip
PROBES = {
    **MODEL,
    **DATA,
    **TOKENIZER,
    **TRAIN,
    **OPTIM,
    **CHECKPOINT,
    **LOGGING,
    **RANKS,
    **RECOMPUTE,
    **FUSIONS,
    **FP8,
    **OTHERS,
}
# All but the default are refused, each value by its own rule.
SINGLE_CHOICE = {name for name, option in ACTIVE.items() if len(option.obeyed_choices) == 1}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, tokenizers and finished runs that options can name."""
    root = tmp_path_factory.mktemp("places")
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(root / "data" / name, np.dtype(np.int32)) as writer:
            for length in generator.integers(5, 40, 60):
                writer.add_document([*generator.integers(0, 100, length), 100])
    tokenizer = train_bpe(["one text and another one"], 300)
    save_tokenizer(tokenizer, root / "tokenizer.json")
    tokenizer.model.save(str(root))
    (root / "nothing").mkdir()
    finished = {"train_iters": 3, "save_interval": 1, "keep_checkpoints": 10}
    with observe.inside(root / "runs"):
        observe.outcome({**finished, "save": str(root / "run")}, root / "cache")
        observe.outcome({"normalization": "RMSNorm", "save": str(root / "rms")}, root / "cache")
    return root


@pytest.fixture(scope="module")
def look(places: Path) -> Any:
    """look(observer, values) -> what it sees; the same question is answered once."""
    seen: dict[Any, str] = {}

    def ask(observer: Any, values: Values, again: bool = False) -> str:
        values = {name: _placed(value, places) for name, value in values.items()}
        question = (observer, "save" in values, *sorted(words_of({**TINY_VALUES, **values})))
        if again or question not in seen:
            with observe.inside(places / "work" / str(len(list((places / "work").glob("*"))))):
                seen[question] = observe.refused_or(observer, values, places / "cache")
        return seen[question]

    return ask


def _placed(value: Any, places: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(each, places) for each in value)
    return value.replace(PLACE, f"{places}/") if isinstance(value, str) else value


def test_every_active_option_has_a_probe() -> None:
    assert PROBES.keys() == ACTIVE.keys() - SINGLE_CHOICE


@pytest.mark.parametrize("name", PROBES)
def test_option_shows(name: str, look: Any) -> None:
    option, probe = ACTIVE[name], PROBES[name]
    value = option.another_value() if probe.value is UNSET else probe.value
    before = {**needed_by(option), **probe.given}
    assert value != before.get(name, TINY_VALUES.get(name, option.default)), "the probe changes nothing"
    first, second = (
        look(probe.look, values) for values in (before, {**before, name: value, **probe.instead})
    )
    assert first != second, f"{option.show(value)} is ignored"
    refused = [number for number, seen in ((1, first), (2, second)) if REFUSAL.match(seen)]
    assert refused == ([] if probe.refused is None else [probe.refused]), (first, second)


@pytest.mark.parametrize("name", sorted(SINGLE_CHOICE))
def test_only_choice(name: str) -> None:
    option: Option = ACTIVE[name]
    for value in set(option.choices) - {option.default}:
        with pytest.raises(InvalidConfigError, match=option.spec.refused[value].rule):
            parse_args(option.show(value).split())


@pytest.mark.parametrize(
    "observer",
    [
        observe.plan,
        observe.vocabulary,
        observe.choices,
        observe.data,
        observe.numbers,
        observe.outcome,
        observe.process,
        observe.ranks,
    ],
)
def test_the_same_options_look_the_same(observer: Any, look: Any) -> None:
    """A probe that saw chance would pass whatever an option does."""
    values = {"manual_gc": True} if observer is observe.process else {}
    assert look(observer, values) == look(observer, values, again=True)


def test_a_cpu_has_no_cache_of_device_memory(places: Path, look: Any) -> None:
    assert "rule: cached-device-memory" in look(observe.choices, {"empty_unused_memory_level": 2})


def test_threads_are_set_beside_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host prepares data and writes checkpoints with them."""
    before = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"deterministic": False, "empty_cache_level": 0}
    try:
        device, _ = open_device(RuntimeConfig(threads=before + 1), Environment(), **options)
        assert (device.type, torch.get_num_threads()) == ("cuda", before + 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
def test_cached_memory_is_returned_on_a_gpu(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    take_steps(opened(tmp_path, {"device": "cuda", "empty_unused_memory_level": level}), 1)
    assert len(emptied) == level
