"""`redline ledger`: where the time of a profiled step went, from a trace of any PyTorch trainer or a run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from redline.cli.console import ReportConsole
from redline.cli.parser import Parser, at_least
from redline.config import parse_args
from redline.errors import DataError, UsageError
from redline.formulas.flops import flops_per_token
from redline.formulas.resolve import shape_of
from redline.hardware import Hardware, hardware_named
from redline.ledger import LEDGER_FILE, Reference, StepAccount, join_ranks, read_account, write_account
from redline.ledger.take import take_account
from redline.ledger.trace import Trace, read_trace
from redline.report import print_account

DESCRIPTION = """\
Cuts each profiled step so that every instant has one owner, and adds the time up by cause: from 100% of peak
to the MFU reached. Reads traces of torch.profiler, of Redline or any other PyTorch trainer (one file a rank),
and folders of runs. What a trace does not hold, it does not guess: shapes are needed for FLOPs
(record_shapes=True), regions or with_stack=True for layers."""
USAGE = """\
redline ledger TRACE.json[.gz] ... [options] [--flags of redline train]
       redline ledger RUN_DIR [options]"""
EPILOG = """\
Model FLOPs come from --model-flops, else from the model that flags of `redline train` state (--preset,
--seq-length, --global-batch-size; divided by the ranks of the job: as many as its traces say, and no fewer
than there are traces), else from the shapes of the trace's operators.

examples:
  redline ledger runs/mine
  redline ledger trace-rank*.json.gz --preset llama3-8b --seq-length 8192 --global-batch-size 128
  redline ledger trace.json --peak 989.5e12 --model-flops 1.1e15 --json"""

TRACES = ("trace*.json", "trace*.json.gz", "*.pt.trace.json", "*.pt.trace.json.gz")
DTYPE = "bf16"  # whose peak counts where --dtype does not say
STEP = re.compile(r"step(\d+)")
CYCLE = re.compile(r"(.+)\.(\d+)\.pt\.trace\.json(?:\.gz)?")  # tensorboard_trace_handler: process and time


def main(argv: Sequence[str]) -> int:
    """Print the account; returns the exit code, raises RedlineError."""
    parser = Parser("redline ledger", usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="traces, one a rank, or the folder of a run")
    parser.add_argument("--json", action="store_true", help="print ledger.json's document")
    parser.add_argument("-o", "--output", metavar="FILE", help="write that document to a file too")
    parser.add_argument("--operators", type=at_least(0), default=20, metavar="N", help="rows of that table")
    parser.add_argument("--peak", type=float, metavar="X", help="dense FLOP/s of one device")
    parser.add_argument("--gpu", metavar="NAME", help="take peak and bandwidth from its data sheet")
    parser.add_argument("--dtype", default="", metavar="NAME", help=f"whose peak (default: {DTYPE})")
    parser.add_argument("--model-flops", type=float, metavar="X", help="of one step on one rank")
    args, words = parser.parse_known_args(list(argv))
    if not args.paths:
        raise UsageError("redline ledger: no trace is named.", mend="see `redline ledger --help`.")
    for name in ("peak", "model_flops"):
        if (value := getattr(args, name)) is not None and not 0 < value < float("inf"):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} is no amount.", mend=f"write for example {flag} 989e12.")
    stated = Reference(
        dtype=args.dtype,
        peak_flops_per_s=args.peak,
        peak_source="--peak" if args.peak else "",
        model_flops=args.model_flops,
        flops_source="--model-flops" if args.model_flops else "",
    )
    account = _account([Path(path) for path in args.paths], stated, args.gpu, words)
    if args.output:
        write_account(Path(args.output), account)
    if args.json:
        print(json.dumps(account.as_dict(), indent=2, allow_nan=False))
    else:
        print_account(account.as_dict(), ReportConsole(), operators=args.operators)
    return 0


def _account(paths: Sequence[Path], stated: Reference, gpu: str | None, words: Sequence[str]) -> StepAccount:
    says_nothing = stated == Reference() and not gpu and not words
    if len(paths) == 1 and paths[0].name == LEDGER_FILE and says_nothing:
        return read_account(paths[0])
    if len(paths) == 1 and paths[0].is_dir():
        found = paths[0] / LEDGER_FILE
        if found.exists() and says_nothing:
            return read_account(found)
        paths = traces_in(paths[0])
    if folder := next((path for path in paths if path.is_dir()), None):
        raise UsageError(
            f"redline ledger: {folder} is a folder among {len(paths)} paths.",
            why="several paths are the traces of one job's ranks.",
            mend="name one run's folder alone, or traces only; `redline report A B` compares runs.",
        )
    traces = _of_one_job([read_trace(path) for path in paths])
    return join_ranks([take_account(trace, _reference(trace, stated, gpu, words)) for trace in traces])


def _of_one_job(traces: Sequence[Trace]) -> list[Trace]:
    """The traces as ranks of one job, which has no fewer; where they do not say which, in the order given.

    Raises: UsageError when two of them are of the same rank or process.
    """
    _check_no_twins(traces)
    world_size = max(len(traces), *(trace.world_size for trace in traces))
    told_apart = len({trace.rank for trace in traces}) == len(traces)
    return [
        replace(trace, rank=trace.rank if told_apart else index, world_size=world_size)
        for index, trace in enumerate(traces)
    ]


def _check_no_twins(traces: Sequence[Trace]) -> None:
    found: dict[str, Trace] = {}
    for trace in traces:
        whose = _whose(trace)
        if whose in found:
            raise UsageError(
                f"redline ledger: {found[whose].source} and {trace.source} are both of {whose}.",
                why="several traces are those of one job's ranks, one a rank.",
                mend="name one trace a rank; `redline report A B` compares runs.",
            )
        if whose:
            found[whose] = trace


def _whose(trace: Trace) -> str:
    """The rank that a trace says it is of, else the process that its name says; "" where neither does."""
    if trace.says_rank:
        return f"rank {trace.rank}"
    cycle = CYCLE.fullmatch(trace.source)
    return f"process {cycle[1]}" if cycle else ""


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder's latest profiled step, one a rank; of a process's unnumbered ones the newest.

    Raises: DataError when there is none.
    """
    found = sorted({path for pattern in TRACES for path in folder.glob(pattern)})
    if not found:
        raise DataError(
            f"{folder} holds no trace and no {LEDGER_FILE}.",
            why="a run leaves them after its profiled steps, unless --no-profile-ledger was given.",
            mend="name the trace itself, or the folder of another run.",
        )
    steps = {path: int(match[1]) if (match := STEP.search(path.name)) else -1 for path in found}
    newest: dict[str, tuple[int, Path]] = {}
    for path in found:
        if steps[path] == max(steps.values()):
            cycle = CYCLE.fullmatch(path.name)
            process, time = (cycle[1], int(cycle[2])) if cycle else (path.name, 0)
            newest[process] = max(newest.get(process, (time, path)), (time, path))
    return [path for _, path in newest.values()]


def _reference(trace: Trace, stated: Reference, gpu: str | None, words: Sequence[str]) -> Reference:
    hardware = _hardware(trace, gpu)
    dtype = stated.dtype or DTYPE
    kind = "cuda" if trace.device else "cpu"
    reference = replace(stated, device=trace.device_name, kind=kind, dtype=dtype)
    if hardware is not None:
        reference = replace(reference, bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s)
    if stated.peak_flops_per_s is None:
        peak = hardware.peak(dtype) if hardware is not None else None
        if peak is None and (gpu or stated.dtype):
            raise _no_peak(dtype, hardware)
        if hardware is not None and peak is not None:
            reference = replace(reference, peak_flops_per_s=peak, peak_source=hardware.peak_source)
    if words and stated.model_flops is None:
        reference = _with_model(reference, trace, words)
    return reference


def _no_peak(dtype: str, hardware: Hardware | None) -> UsageError:
    """The error for a rate that was asked for and is not known."""
    if hardware is None:
        return UsageError(
            f"--dtype {dtype}: there is no data sheet of the trace's device.",
            why="it names the rate of the data sheet that is the peak.",
            mend="state the device with --gpu, or the peak in FLOP/s with --peak.",
        )
    return UsageError(
        f"--dtype {dtype}: the data sheet of {hardware.name} has no such rate.",
        mend=f"take one of {', '.join(hardware.peak_flops)}, or state its FLOP/s with --peak.",
    )


def _hardware(trace: Trace, gpu: str | None) -> Hardware | None:
    found = hardware_named(gpu or trace.device_name) if gpu or trace.device_name else None
    if gpu and found is None:
        raise UsageError(
            f"--gpu {gpu}: there is no data sheet of that device.",
            why="its peak rates would be a guess.",
            mend="state its dense FLOP/s with --peak.",
        )
    return found


def _with_model(reference: Reference, trace: Trace, words: Sequence[str]) -> Reference:
    """The model FLOPs of a step on one rank, from the flags of a training run."""
    config = parse_args(list(words), training=False).config
    size = config.train.global_batch_size
    if size is None:
        raise UsageError(
            "redline ledger: the model is stated without --global-batch-size.",
            why="FLOPs are counted for a whole step, over all ranks.",
            mend="add it, or give --model-flops.",
        )
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise UsageError(
            "redline ledger: the model is stated without --vocab-size.",
            why="the head's product depends on it.",
            mend="add it, or give --model-flops.",
        )
    length = config.train.seq_length
    shape = shape_of(config.model, length, vocab_size, 1, moe=config.moe, mtp=config.mtp)
    flops = flops_per_token(shape, length)
    tokens = length * size / trace.world_size
    return replace(
        reference,
        model_flops=flops.total * tokens,
        attention_flops=flops.attention_core * tokens,
        flops_source="model",
    )
