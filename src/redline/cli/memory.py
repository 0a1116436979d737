"""`redline memory`: parameters, FLOPs and theoretical memory of a configuration, without torch or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.cli.memory_against import open_against
from redline.config import (
    InvalidConfigError,
    Parsed,
    Problem,
    RunConfig,
    parse_args,
    with_values,
)
from redline.config.layers import found
from redline.config.parse import is_flag
from redline.config.waits import CONTEXT_PARALLEL, EXPERT_PARALLEL, FSDP, MOE, PIPELINE_PARALLEL
from redline.errors import ConfigError
from redline.formulas.activations import Held
from redline.formulas.megatron import (
    MegatronLayout,
    megatron_activation_bytes,
    megatron_flops_per_step,
    megatron_weight_and_optimizer_bytes,
)
from redline.formulas.memory import activation_table
from redline.hardware import SHEETS, Hardware, detect_cpu, glance, hardware_named, usable_memory
from redline.ledger import stated_vocab_size
from redline.plan import Plan, make_plan
from redline.plan.cost_memory import stage_memories
from redline.plan.cost_setup import setup_of
from redline.plan.host_memory import host_need, host_shares, ranks_of_a_host
from redline.plan.lighter import Change, advice, lighter_changes
from redline.units import format_bytes, format_count

# What the cost model plans stage by stage, though `redline train` does not take it.
LAYOUTS = {each.rule for each in (PIPELINE_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL, MOE, FSDP)}

EXAMPLES = {"--gpu": "--gpu h100", "--gpus": "--gpus 64", "--against": "--against runs/mine"}
USAGE = """\
usage: redline memory [CONFIG.toml] [--flags of redline train] [--gpu NAME] [--gpus N] [--tensors]
                      [--against RUN_DIR] [--json]

Parameters, FLOPs (floating-point operations) and the predicted peak memory of training on one device, part
by part. Nothing is allocated, and neither torch nor a GPU is needed.

  --gpu NAME   the device to plan for, for example h100, a100, rtx4090 (default: this machine's)
  --gpus N     ranks in all, over which --use-distributed-optimizer shards (default: as many as tp takes, or
               the run's of --against); a layout that redline train does not take is planned by pipeline stage
  --against D  put the peak that the run in D measured beside the prediction: of that run's options and those
               given on top, or of those given alone where they are a --preset or a CONFIG.toml
  --tensors    also list every tensor that is kept from the forward for the backward pass
  --json       print one JSON document

examples:
  redline memory --preset llama3.2-1b --micro-batch-size 4 --gpu h200
  redline memory --preset llama3-8b --num-layers 8 --seq-length 8192 --bf16 --tensors
  redline memory config.toml --vocab-size 32000 --json"""


def main(argv: Sequence[str]) -> int:
    """Print the report; returns the exit code, raises ConfigError."""
    words = list(argv)
    if "-h" in words or "--help" in words:
        print(USAGE)
        return 0
    as_json, tensors = _take_switch(words, "--json"), _take_switch(words, "--tensors")
    gpu, against = _take_value(words, "--gpu"), _take_value(words, "--against")
    gpus = _number(_take_value(words, "--gpus"))
    run = None if against is None else open_against(Path(against), words)
    parsed = parse_args(words if run is None else run.words, training=False)
    for notice in parsed.notices:
        print(notice, file=sys.stderr)
    config = parsed.config
    layouts = _refused_layouts(parsed, gpus)
    ran_on = None if run is None or gpu is not None else run.device(config)
    hardware = ran_on or _hardware(config, gpu)
    if layouts and gpus is not None:
        _refuse_beside_stages(config, layouts, {"--tensors": tensors, "--against": run is not None})
        return _stages(config, gpus, hardware, as_json)
    ranks = gpus or (run and run.ranks) or _fewest_ranks(config)
    vocab_size = (run and run.vocab_size(config)) or _vocab_size(config)
    config = _with_length(config)
    plan = make_plan(config, hardware, vocab_size, ranks)
    elsewhere = gpu is not None or (ran_on is not None and ran_on.kind != "cpu")
    host = None if elsewhere else usable_memory()  # of another machine it is not known
    lighter = None  # what would make it fit, where it does not
    if plan.memory.reserved > hardware.memory_bytes:
        each = None if host is None else host // ranks_of_a_host(plan, hardware)
        lighter = lighter_changes(config, plan, hardware, hardware.memory_bytes, host_limit_bytes=each)
    if as_json:
        report = document(plan, hardware, tensors)
        if lighter is not None:
            report["lighter"] = [asdict(change) for change in lighter]
        if run is not None:
            report["against"] = run.comparison(plan)
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(plan, hardware, host, tensors, lighter)
        if run is not None:
            run.print(plan)
    return 0


def _refused_layouts(parsed: Parsed, gpus: int | None) -> list[Problem]:
    """The layouts asked for that `redline train` does not take; the cost model plans them on `gpus` ranks.

    Raises: InvalidConfigError with all else that training refuses, since nothing here would model it.
    """
    problems = found(parsed.config, [], explicit=parsed.explicit, training=True)
    problems = [each for each in problems if each.rule != "length-stated"]  # memory does not depend on it
    layouts = [each for each in problems if each.rule in LAYOUTS]
    others = [each for each in problems if each not in layouts]
    if others or (layouts and gpus is None):
        raise InvalidConfigError(others or layouts)
    return layouts


def _refuse_beside_stages(config: RunConfig, layouts: Sequence[Problem], asked: Mapping[str, bool]) -> None:
    """Raise InvalidConfigError for what the cost model does not count by stage, rather than ignore it."""
    r, layout = config.recompute, layouts[0].flags[0]
    chosen = {"--recompute auto": r.recompute == "auto", "--cpu-offloading": r.cpu_offloading}
    what = "{} is not counted beside {}."
    why = f"with {layout} stages are planned by the cost model, which counts no single tensors."
    mend = "leave it out, or state recompute with --recompute-granularity."
    problems = [
        Problem("stages-are-coarse", what.format(flag, layout), why, mend, (flag.split()[0], layout))
        for flag, given in {**chosen, **asked}.items()
        if given
    ]
    if problems:
        raise InvalidConfigError(problems)


def _fewest_ranks(config: RunConfig) -> int:
    """As many as the layout takes at least, where nobody says how many there are: dp is 1."""
    p = config.parallel
    return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size


def _stages(config: RunConfig, gpus: int, hardware: Hardware, as_json: bool) -> int:
    """Memory of each pipeline stage's fullest rank on `gpus` ranks, by the cost model."""
    setup = setup_of(config, gpus, vocab_size=_vocab_size(config))
    stages = stage_memories(setup)
    if as_json:
        print(json.dumps({"stages": [stage.as_dict() for stage in stages]}, indent=2))
        return 0
    from redline.cli.console import ReportConsole
    from redline.report.text import key_values

    console, grid = ReportConsole(), setup.grid
    layout = f"{gpus} ranks: tp {grid.tp}, pp {grid.pp}, cp {grid.cp}, ep {grid.ep}, dp {grid.dp}"
    for number, stage in enumerate(stages):
        rows = [
            (name.replace("_", " "), format_bytes(size)) for name, size in stage.as_dict().items() if size
        ]
        rows.append(_verdict(stage.total, hardware))
        console.print(key_values(f"stage {number} of {layout}", rows))
    return 0


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--gpus {text} is no number of devices.", mend="write for example --gpus 64.")
    return int(text)


def document(plan: Plan, hardware: Hardware, tensors: bool = False) -> dict[str, Any]:
    """The report as plain values."""
    size = plan.batch.final_batch_size
    report: dict[str, Any] = {
        "model": asdict(plan.shape),
        "hardware": hardware.as_dict(),
        "ranks": {"total": plan.grid.world_size, "tp": plan.grid.tp, "dp": plan.grid.dp},
        "precision": plan.precision,
        "choices": [asdict(choice) for choice in plan.choices],
        "micro_batch_size": plan.microbatch.micro_batch_size,
        "global_batch_size": size,
        "seq_length": plan.seq_length,
        "parameters": plan.parameters.as_dict(),
        "flops_per_token": {name: flops.as_dict() for name, flops in plan.flops.items()},
        "memory": plan.memory.as_dict() | {"attention": plan.microbatch.attention},
        "megatron": megatron_estimate(plan),
    }
    if tensors:
        table = activation_table(plan.shape, plan.microbatch)
        report["saved_tensors"] = [{"times": times, **asdict(held)} for times, held in table]
    return report


def megatron_estimate(plan: Plan) -> dict[str, float]:
    """What Megatron-LM's own report says of a rank of the same launch."""
    batch = plan.microbatch
    layout = MegatronLayout(
        tp=plan.grid.tp,
        dp=plan.grid.dp,
        distributed_optimizer=plan.data_parallel.sharded,
        sequence_parallel=batch.sequence,
        selective_recompute="core_attn" in batch.recompute.modules,
    )
    return {
        "flops_per_step": megatron_flops_per_step(plan.shape, plan.seq_length, plan.batch.final_batch_size),
        "weight_and_optimizer_bytes": megatron_weight_and_optimizer_bytes(plan.shape, layout),
        "activation_bytes": megatron_activation_bytes(
            plan.shape, plan.seq_length, batch.micro_batch_size, layout
        ),
    }


def _take_switch(words: list[str], name: str) -> bool:
    found = name in words
    words[:] = [word for word in words if word != name]
    return found


def _take_value(words: list[str], name: str) -> str | None:
    """Remove every `name VALUE` and `name=VALUE` from the words; the last one counts, as of any flag."""
    value = None
    while (
        place := next((at for at, word in enumerate(words) if word.partition("=")[0] == name), None)
    ) is not None:
        _, joined, value = words.pop(place).partition("=")
        if not joined:
            if place == len(words) or is_flag(words[place]):
                raise ConfigError(f"{name} needs a value.", mend=f"write for example {EXAMPLES[name]}.")
            value = words.pop(place)
    return value


def _hardware(config: RunConfig, gpu: str | None) -> Hardware:
    if gpu is not None:
        named = hardware_named(gpu)
        if named is None:
            raise ConfigError(
                f"--gpu {gpu}: there is no data sheet of that device.",
                why="its memory and peak rates would be a guess.",
                mend=f"use one of: {', '.join(sheet.name for sheet in SHEETS)}.",
            )
        return named
    return detect_cpu() if config.runtime.device == "cpu" else glance()


def _vocab_size(config: RunConfig) -> int:
    if (size := stated_vocab_size(config)) is not None:
        return size
    raise InvalidConfigError(
        [
            Problem(
                "vocabulary-stated",
                "the size of the vocabulary is not known: --vocab-size is not given.",
                "embedding, head and loss depend on it, and no tokenizer is opened here.",
                "give --vocab-size, or a --preset that states it.",
                ("--vocab-size",),
            )
        ]
    )


def _with_length(config: RunConfig) -> RunConfig:
    """Memory does not depend on a run's length: where none is stated, one longer than any warm-up."""
    stated = config.train.train_iters is not None or config.train.train_samples is not None
    return config if stated else with_values(config, {"train_iters": 10**9})


def _print(
    plan: Plan, hardware: Hardware, host: int | None, tensors: bool, lighter: Sequence[Change] | None
) -> None:
    from redline.cli.console import ReportConsole
    from redline.report.text import key_values

    console = ReportConsole()
    console.print(key_values("parameters", _parameter_rows(plan)))
    console.print(key_values("model FLOPs, forward and backward", _flop_rows(plan)))
    console.print(key_values("predicted peak memory of training", _memory_rows(plan, hardware, host)))
    if lighter is not None:
        console.print(key_values("to make it fit", [("change", advice(lighter))]))
    console.print(key_values("decided", ((each.what, f"{each.ran} - {each.why}") for each in plan.choices)))
    if tensors:
        table = activation_table(plan.shape, plan.microbatch)
        console.print(key_values("saved for backward", (_tensor_row(*row) for row in table)))


def _parameter_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    for part, count in plan.parameters.by_part:
        yield part, f"{count:,}"
    yield "total", f"{plan.parameters.total:,} ({format_count(plan.parameters.total)})"
    yield "without embedding", f"{plan.parameters.non_embedding:,}"


def _flop_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, flops in plan.flops.items():
        share = flops.attention_core / flops.total
        tokens = plan.seq_length * plan.batch.final_batch_size
        yield (
            f"a token, attention {name}",
            f"{format_count(flops.total)} ({share:.1%} of it attention's core), "
            f"{format_count(flops.total * tokens)} a step of {tokens:,} tokens",
        )


def _memory_rows(plan: Plan, hardware: Hardware, host: int | None) -> Iterator[tuple[str, str]]:
    stage = plan.memory.fullest
    batch = plan.microbatch
    yield "device", hardware.name
    yield "ranks", _ranks(plan)
    yield "microbatch", f"{batch.micro_batch_size} x {batch.seq_length} tokens, {plan.precision}"
    yield "attention", batch.attention
    for name, size in stage.parts.items():
        if size:
            yield name.replace("_", " "), format_bytes(size)
    yield "peak", f"{format_bytes(stage.total)} (while the {stage.peak_at} runs)"
    if stage.host:
        yield "in host memory", "; ".join(host_shares(stage))
        ranks = ranks_of_a_host(plan, hardware)
        needed = host_need(plan, hardware, ranks)
        if host is not None:
            verdict = "fit" if needed <= host else "do not fit"
            shared = f" of {ranks} ranks" if ranks > 1 else ""
            yield "host", f"{format_bytes(needed)}{shared} {verdict} into {format_bytes(host)}"
    if stage.fragmentation or stage.context:
        yield "fragmentation, about", format_bytes(stage.fragmentation)
        yield "device context, about", format_bytes(stage.context)
    for name, size in stage.beside.items():
        yield f"{name.replace('_', ' ')}, beside the allocator", format_bytes(size)
    yield _verdict(stage.reserved, hardware)
    megatron = megatron_estimate(plan)
    yield (
        "Megatron's report",
        f"{format_bytes(megatron['weight_and_optimizer_bytes'])} weights and optimizer, "
        f"{format_bytes(megatron['activation_bytes'])} activations",
    )


def _ranks(plan: Plan) -> str:
    """How many, how they are arranged, and what their number would change."""
    grid = plan.grid
    alone = plan.data_parallel.sharded and grid.dp == 1
    return f"{grid.world_size}: tp {grid.tp}, dp {grid.dp}" + (
        "; nothing is sharded on one dp rank, state how many there are with --gpus" if alone else ""
    )


def _verdict(needed: float, hardware: Hardware) -> tuple[str, str]:
    """Whether so many bytes fit."""
    verdict = "fits" if needed <= hardware.memory_bytes else "does not fit"
    return verdict, f"{format_bytes(needed)} of {format_bytes(hardware.memory_bytes)}"


def _tensor_row(times: int, held: Held) -> tuple[str, str]:
    often = f"{times} x " if times > 1 else ""
    return f"{held.site}: {held.what}", f"{often}{format_bytes(held.num_bytes)}"
