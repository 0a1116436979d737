"""`redline doctor`: why a training job is slow, from its script, machine or run; and what to change."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cli.parser import Parser
from redline.config import read_environment, with_values
from redline.config.tree import options_by_field
from redline.doctor import (
    CHECKS,
    LANGUAGES,
    Case,
    Diagnosis,
    Machine,
    RunRecord,
    combined,
    diagnose,
    live_machine,
    patch_launch,
    phrases,
    read_nccl_log,
    read_nvidia_smi,
    read_run,
    read_topology,
    read_xids,
    sarif,
    texts_of,
)
from redline.doctor.case import unstated
from redline.errors import ConfigError, DataError, UsageError
from redline.files import os_errors_as, write_json_atomic, write_text_atomic
from redline.hardware import SHEETS, Hardware, glance, hardware_named, read_links
from redline.hardware.links import FILE as LINKS_FILE
from redline.ledger import recorded_vocab_size, stated_vocab_size
from redline.plan.cost_setup import Dialect, effective

if TYPE_CHECKING:
    from redline.config.launch import Launch

USAGE = """\
redline doctor [SCRIPT.sh | CONFIG.toml | CONFIG.yaml | RUN_DIR] [options]

Says why a training job is slow and what to change. A launch script is parsed, never executed. Without a path
it examines this machine."""
EXIT_CODES = "exit code: 0 no error found, 1 findings of severity error, 2 the command line cannot be obeyed"
ASSUMED_GPU = "H100 SXM"
RACKS = {"GB200": 72, "GB300": 72}  # devices that share NVLink; eight elsewhere
MAX_BYTES = 64 << 20


def main(argv: Sequence[str]) -> int:
    """Print the report; returns the exit code, raises RedlineError."""
    asked = _parser().parse(list(argv))
    if asked.list_checks:
        _list_checks(asked.lang)
        return 0
    case, assumed, name = _case(asked)
    diagnosis = diagnose(case, lang=asked.lang)
    if asked.sarif:
        with os_errors_as(ConfigError, asked.sarif, "write"):
            write_json_atomic(asked.sarif, sarif(diagnosis.findings, asked.lang))
    fixed = _fix(asked, diagnosis)
    if asked.json:
        from redline.report.doctor_text import document

        print(json.dumps(document(diagnosis, assumed), indent=2, allow_nan=False, ensure_ascii=False))
        if fixed:
            print(fixed, file=sys.stderr)
    else:
        from redline.cli.console import ReportConsole
        from redline.report.doctor_text import print_report

        print_report(ReportConsole(soft_wrap=False), diagnosis, assumed, asked.lang, name)
        if fixed:
            print("\n" + fixed)
    return 1 if diagnosis.worst == "error" else 0


def _parser() -> Parser:
    parser = Parser("redline doctor", usage=USAGE, epilog=EXIT_CODES)
    add = parser.add_argument
    add("path", nargs="?", type=Path, help="what to examine")
    add("--gpu", metavar="NAME", help="the GPU it runs on, for example h100")
    add("--gpus", type=_count, metavar="N", help="GPUs in all, where the script does not say")
    add(
        "--gpus-per-node", type=_count, metavar="N", help="GPUs that share NVLink (8, or 72 in an NVL72 rack)"
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable the script leaves open")
    add("--json", action="store_true", help="print one JSON document")
    add("--sarif", type=Path, metavar="FILE", help="also write the findings as SARIF 2.1.0")
    add(
        "--fix",
        type=Path,
        metavar="OUT",
        help="write the script, TOML or YAML with the safe mends, show the diff",
    )
    add("--lang", choices=LANGUAGES, default="en", help="language of the report")
    add("--nvidia-smi", type=Path, metavar="FILE", help="output of nvidia-smi or nvidia-smi -q")
    add("--topo", type=Path, metavar="FILE", help="output of nvidia-smi topo -m")
    add("--nccl-log", type=Path, metavar="FILE", help="a log written under NCCL_DEBUG=INFO")
    add(
        "--measure",
        action="store_true",
        help="time GEMMs, copies and, over several GPUs, an all-reduce here (30 s on GPUs, 3 on a CPU)",
    )
    add("--list-checks", action="store_true", help="list every check and what it looks at")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def _list_checks(lang: str) -> None:
    for each in CHECKS:
        texts = texts_of(each.id, "", lang)
        print(f"{each.id}  {each.account:13} {each.severity:7}  {texts['title']}  ({texts['looks']})")


def case_of_run(folder: Path) -> Case:
    """A run's folder as `redline doctor FOLDER` takes it.

    Raises: RedlineError when its configuration or its records cannot be read.
    """
    return _case(_parser().parse([str(folder)]))[0]


def _case(asked: Any) -> tuple[Case, list[dict[str, Any]], str]:
    """The case, what was assumed for it, and how to name it."""
    machine = _machine(asked)
    if asked.path is None:
        environment = _live_environment()
        hardware = _named(asked.gpu) if asked.gpu else _seen(machine) or _this_gpu()
        return (
            Case(machine=machine, environment=environment, hardware=hardware),
            [],
            phrases(asked.lang)["this_machine"],
        )
    if not asked.path.exists():
        raise UsageError(
            f"there is no {asked.path}.",
            why="the doctor reads a launch script, a TOML or YAML file, or the folder of a run.",
            mend="correct the path, or leave it out to examine this machine.",
        )
    from redline.config.launch import read_launch

    try:
        launch = read_launch(asked.path, set_values=_settings(asked.set))
        run = read_run(asked.path) if asked.path.is_dir() else None
    except DataError as error:  # exit code 1 is kept for findings
        raise UsageError(error.what, error.why, error.mend) from error
    if run is not None:
        launch = _as_it_ran(launch, run)
    launch = _with_vocabulary(launch, run)
    dialect = _dialect(launch)
    assumed: list[dict[str, Any]] = []
    hardware = _named(asked.gpu) if asked.gpu else _seen(machine) or _named_or_none(run.gpu if run else None)
    hardware = hardware or _this_gpu()
    if hardware is None and run is None:
        hardware = hardware_named(ASSUMED_GPU)
        assumed.append(_assumption("gpu", "--gpu", asked.lang))
    world_size = asked.gpus or launch.world_size or _ranks(launch) or (run.ranks if run else None)
    if world_size is None:
        p = launch.config.parallel
        world_size = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        if dialect == "megatron":
            assumed.append(_assumption("gpus", "--gpus", asked.lang))
    model = launch.config.model
    if model.vocab_size is None and model.padded_vocab_size is None:
        assumed.append(_assumption("vocab_size", "--vocab-size", asked.lang))
    environment = {name: str(value) for name, (value, _) in launch.environment.items() if value is not None}
    case = Case(
        launch=launch,
        dialect=dialect,
        world_size=world_size,
        hardware=hardware,
        gpus_per_node=_per_node(asked, launch, hardware),
        assumed=tuple(each["name"] for each in assumed),
        environment=environment,
        links=read_links(read_environment().cache_dir / LINKS_FILE),
        machine=machine,
        run=run,
    )
    return case, assumed, str(asked.path)


def _as_it_ran(launch: Launch, run: RunRecord) -> Launch:
    """The launch with what a run chose in place of `auto`."""
    values = {}
    for what in ("transformer_impl", "attention_backend"):
        ran = run.choices.get(what.replace("_", "-"))
        if ran in options_by_field()[what].choices:
            values[what] = ran
    return replace(launch, config=with_values(launch.config, values))


def _with_vocabulary(launch: Launch, run: RunRecord | None) -> Launch:
    """The launch with the size of the vocabulary where it is known: as the run recorded it, or the demo's."""
    config = launch.config
    size = None if run is None else recorded_vocab_size(launch.path, config, run.parameters)
    size = size or stated_vocab_size(config)
    return replace(launch, config=with_values(config, {"vocab_size": size}))


def _assumption(name: str, flag: str, lang: str) -> dict[str, Any]:
    why = f"{phrases(lang)[f'assumed_{name}']} ({flag})"
    return {"name": name, "why": why, "file": None, "line": None, "used_by": [], "choices": []}


def _settings(words: Sequence[str]) -> Mapping[str, str]:
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {word} is not NAME=VALUE.", mend="write for example --set NNODES=4.")
        settings[name] = value
    return settings


def _dialect(launch: Launch) -> Dialect:
    return "redline" if launch.of_redline else "megatron"


def _ranks(launch: Launch) -> int | None:
    if launch.nnodes is not None and launch.nproc_per_node is not None:
        return launch.nnodes * launch.nproc_per_node
    return None


def _per_node(asked: Any, launch: Launch, hardware: Hardware | None) -> int:
    if asked.gpus_per_node:
        return int(asked.gpus_per_node)
    if hardware is not None and hardware.name in RACKS:
        return RACKS[hardware.name]
    return launch.nproc_per_node or 8


def _named(gpu: str) -> Hardware:
    found = hardware_named(gpu)
    if found is None:
        raise ConfigError(
            f"--gpu {gpu}: there is no data sheet of that device.",
            why="its memory and peak rates would be a guess.",
            mend=f"use one of: {', '.join(sheet.name for sheet in SHEETS)}.",
        )
    return found


def _named_or_none(name: str | None) -> Hardware | None:
    return hardware_named(name) if name else None


def _seen(machine: Machine | None) -> Hardware | None:
    """The device that nvidia-smi or NVML names, with the memory it reports."""
    if machine is None or not machine.gpus:
        return None
    gpu = machine.gpus[0]
    known = hardware_named(gpu.name, len(machine.gpus))
    return replace(known, memory_bytes=gpu.memory_bytes) if known and gpu.memory_bytes else known


def _this_gpu() -> Hardware | None:
    found = glance()
    return found if found.kind == "cuda" and found.memory_bytes else None


def _machine(asked: Any) -> Machine | None:
    """What was seen of a machine: live without a path, and from the files that were given."""
    files = (asked.nvidia_smi, asked.topo, asked.nccl_log)
    if asked.path is not None and not any(files) and not asked.measure:
        return None
    machine = live_machine() if asked.path is None and not any(files) else Machine()
    if asked.nvidia_smi:
        machine = read_nvidia_smi(_text(asked.nvidia_smi))
        if not machine.gpus:
            raise _not_of(asked.nvidia_smi, "nvidia-smi", "it names no GPU")
    if asked.topo:
        text = _text(asked.topo)
        if "GPU0" not in text:
            raise _not_of(asked.topo, "nvidia-smi topo -m", "it has no column of GPU0")
        machine = read_topology(text, machine)
    if asked.nccl_log:
        log = _text(asked.nccl_log)
        machine = replace(machine, xids=(*machine.xids, *read_xids(log)))
        if "NCCL" in log:
            machine = replace(machine, nccl=read_nccl_log(log))
        else:
            unseen = f"NCCL: {asked.nccl_log} has no line of it (NCCL_DEBUG=INFO at the start writes them)"
            machine = replace(machine, unseen=(*machine.unseen, unseen))
    if asked.measure:
        machine = replace(machine, measured=_measured())
    return machine


def _not_of(path: Path, tool: str, why: str) -> UsageError:
    return UsageError(
        f"{path} is no output of {tool}.", why=f"{why}.", mend=f"write one with `{tool} > {path.name}`."
    )


def _measured() -> dict[str, float]:
    from redline.cli.doctor_measure import measure

    try:
        return measure()
    except ImportError as error:
        raise UsageError(
            "--measure needs torch, which is not installed here.",
            why="the rates are those of GEMMs and copies that torch runs.",
            mend="install torch, or leave --measure out.",
        ) from error


def _live_environment() -> dict[str, str]:
    """This process' variables that concern a run, as config/runtime.py reads them."""
    found = read_environment()
    environment = dict((*found.nccl, *found.transformer_engine))
    single = {
        "CUDA_DEVICE_MAX_CONNECTIONS": found.cuda_device_max_connections,
        "OMP_NUM_THREADS": found.omp_num_threads,
        "PYTORCH_CUDA_ALLOC_CONF": found.pytorch_alloc_conf,
    }
    return environment | {name: str(value) for name, value in single.items() if value is not None}


def _text(path: Path) -> str:
    with os_errors_as(ConfigError, path, "read"), open(path, "rb") as handle:
        return handle.read(MAX_BYTES).decode("utf-8", "replace")


def _fix(asked: Any, diagnosis: Diagnosis) -> str:
    """Write the patched launch and return the diff to show; "" when nothing was asked for."""
    if asked.fix is None:
        return ""
    say = phrases(asked.lang)
    case = diagnosis.case
    if case.launch is None:
        raise UsageError(
            "--fix needs a launch script or a configuration.",
            why="there is nothing to patch on a machine.",
            mend="name one, for example `redline doctor pretrain.sh --fix better.sh`.",
        )
    patch = patch_launch(case, combined(diagnosis))
    with os_errors_as(ConfigError, asked.fix, "write"):
        write_text_atomic(asked.fix, patch.text)
        if asked.fix.suffix == ".sh":
            asked.fix.chmod(0o755)
    missed = [what for what in _not_taken(asked, case, diagnosis) if not any(map(_says(what), patch.undone))]
    undone = [*patch.undone, *missed]
    lines = [patch.diff(str(case.launch.path), str(asked.fix)).rstrip() or say["nothing_to_patch"]]
    lines += [f"{say['not_patched']}: {what}" for what in dict.fromkeys(undone)]
    return "\n".join([*lines, say["patched"].format(path=asked.fix)])


def _says(change: str) -> Callable[[str], bool]:
    """Whether a line of what is left for the hand ends in this change."""
    return lambda line: line.endswith(change)


def _not_taken(asked: Any, case: Case, diagnosis: Diagnosis) -> list[str]:
    """Changes that a second reading of the patched file does not show."""
    from redline.config.launch import read_launch

    if asked.fix.suffix != case.launch.path.suffix:  # type: ignore[union-attr]
        return []
    again = read_launch(asked.fix, set_values=_settings(asked.set))
    missed = []
    for name, value in combined(diagnosis).values.items():
        if effective(again.config, name, case.dialect, again.stated) != value:
            option = options_by_field()[name]
            gone = value == unstated(name, case.dialect)
            missed.append(f"without {option.flag}" if gone else option.show(value))
    return missed
