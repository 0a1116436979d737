"""Data and tensor parallelism on the GPUs of one host: see gpu_parallel.sh.

equal   losses of the same run on one GPU and on several, by layout                    (under torchrun)
steps   tokens/s, memory and each rank's ledger of the 8-layer 8B and the 1B, by layout (the same)
links   GEMMs joined to a collective, by method, at both models' shapes                 (the same)
watch   the clock of slow ranks, and the record of the newest collectives               (the same)
kill    a rank is killed under load: how long until the job has ended, what it says, and whether it resumes

On a machine without GPUs processes stand in for them, over gloo: with --dry everything but `links` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parallel_job import DEVICE, Job, Limits
from parallel_rows import DP, DRY, FULL, PRECISIONS, TWO, Row, Sizes, equal_rows, steps_rows, steps_words
from processes import children_of

from redline.bench.record import write_result
from redline.comm import every, write_flight_record
from redline.comm.linked_gemm import Chunked, Plain
from redline.comm.measure import Sites, time_gathers, time_scatters
from redline.comm.pushed import TURNS, Pushed
from redline.comm.symmetric import SymmetricMemory, open_area, reserve
from redline.config import Environment, parse_args
from redline.data import samples
from redline.ledger import Reference, join_ranks
from redline.ledger.take import take_account
from redline.ledger.trace import parse_trace
from redline.run import OpenRun, open_run
from redline.step import StopConditions, train
from redline.step.loop import Action
from redline.step.profile import Captured, StepProfiler, TorchCapture, Window

WARMUP, TIMED, PROFILED = 3, 6, 3  # steps; who waits for whom differs from one to the next
NUM_STEPS = WARMUP + TIMED + 1 + PROFILED  # the last ones are captured, the one before warms the tracer up
START_S = {"cuda": 60, "cpu": 180}  # until a run that is to be killed has some checkpoints
ROW_S = {"equal": 60, "steps": 50, "links": 60, "watch": 60}
LOSSES = ("dp", "tp", "collective", "launch", "synchronisation", "copies", "gemm", "attention")


def opened(job: Job, words: str, environment: Environment) -> OpenRun:
    """The run of these words, ready to step; whoever looks at the job sees where it stands."""
    job.doing("opening the run")
    run = open_run(parse_args(words.split()), environment, lambda _: None)
    job.doing("stepping", run.progress)
    return run


def losses(job: Job, words: str, environment: Environment) -> Row:
    """The losses of a run of these words, and how long it took to open and to step."""
    began = time.monotonic()
    run = opened(job, words, environment)
    ready, step = time.monotonic(), run.make_step()
    with closing(run.batches()) as batches:
        found = [step(next(batches)).loss for _ in range(run.plan.batch.total_iterations)]
    run.state.optimizer.settle()
    ended = time.monotonic()
    return {"losses": found, "open_s": round(ready - began, 1), "steps_s": round(ended - ready, 1)}


def equal(job: Job, sizes: Sizes) -> None:
    works = [partial(losses, job, f"{sizes.small} {words}") for words in PRECISIONS.values()]
    alone = job.row("one GPU", lambda: dict(zip(PRECISIONS, job.apart(works), strict=True)), wanted=True)
    if alone is None:
        return
    for name, precision, words in equal_rows(job.size):

        def compared(precision: str = precision, words: str = words) -> Row | None:
            if "losses" not in alone.get(precision, {}):
                return {"error": f"no losses of one GPU in {precision}"}
            line = f"{sizes.small} {PRECISIONS[precision]} {words}"
            found = job.on_all(partial(losses, job, line))
            if not job.leads:
                return None
            one, several = alone[precision]["losses"], found.pop("losses")
            off = [abs(b / a - 1) for a, b in zip(one, several, strict=True)]
            return {"gpus": job.size, "first": off[0], "largest": max(off), "loss": several[-1], **found}

        job.row(name, compared)


def steps(job: Job, sizes: Sizes) -> None:
    one: dict[str, float] = {}  # tokens/s
    rows = {f"{model}, {name}": (model, ranks, words) for model, name, ranks, words in steps_rows(job.size)}
    for name, (model, ranks, layout) in rows.items():
        line = f"{steps_words(sizes, model, layout, ranks)} --train-iters {NUM_STEPS}"
        base = f"{model}, one GPU{', two samples' if TWO in layout else ''}"

        def timed(line: str = line, ranks: int = ranks, base: str = base) -> Row | None:
            found: Row | None = job.on_first(ranks, partial(measured, job, line))
            if found is None:
                return None
            if base in one:
                found["each_of_one_gpu"] = round(found["tokens_per_s"] / ranks / one[base], 4)
            return {"gpus": ranks, **found}

        row = job.row(name, timed)
        if row and name == base and "tokens_per_s" in row:
            one[name] = row["tokens_per_s"]


def measured(job: Job, words: str, environment: Environment) -> Row:
    """Timed steps of a run of these words, and the ledger of some more."""
    run = opened(job, words, environment)
    step, outcomes, captured = run.make_step(), [], []
    window = Window(NUM_STEPS - PROFILED + 1, NUM_STEPS, TorchCapture(run.device, captured.append))
    with closing(run.batches()) as batches:
        keep = Action("keep", 1, outcomes.append)
        profiler = StepProfiler(step, [window])
        train(run.state, step, batches, [keep], StopConditions(), NUM_STEPS, profiler)
    run.state.optimizer.settle()
    times = sorted(outcome.time_s for outcome in outcomes[WARMUP : WARMUP + TIMED])
    tokens, took = outcomes[0].num_tokens, times[len(times) // 2]
    flops = run.plan.flops["causal-half"].total * tokens / run.groups.world.size
    peak = run.hardware.peak("bf16")
    return {
        "tokens_per_s": tokens / took,
        "step_s": took,
        "steps_s": [times[0], times[-1]],
        "mfu_of_bf16_peak": flops / took / peak if peak else None,
        "peak_memory_bytes": run.meter.peak_bytes(),
        "predicted_memory_bytes": run.plan.memory.total,
        "loss": outcomes[-1].loss,
        **accounts(run, captured[0], flops),
        "choices": [
            f"{choice.what}: {choice.ran}: {choice.why}"
            for choice in run.choices
            if choice.what.startswith("tp-comm")
        ],
    }


def accounts(run: OpenRun, captured: Captured, flops: float) -> Row:
    """What each rank's ledger says of a captured step; a collective's ms are those that nothing hid."""
    hardware, precision = run.hardware, run.plan.precision
    reference = Reference(
        device=hardware.name,
        kind=hardware.kind,
        dtype=precision,
        peak_flops_per_s=hardware.peak(precision),
        bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
        model_flops=flops,
        flops_source="model",
    )
    rank = run.groups.rank
    trace = replace(parse_trace(captured.content, Path("trace.json")), rank=rank, source="trace.json")
    sent: Counter[str] = Counter()  # ms on the device, hidden or not
    for each in trace.device:
        if any(word in each.name.lower() for word in ("nccl", "barrier", "memcpy dtod", "memcpy ptop")):
            sent[each.name.split("(")[0][:60]] += (each.end - each.start) / 1e6 / PROFILED
    account = take_account(trace, reference)
    joined = join_ranks(every(run.groups.control, lambda: account))
    # A rank that is early waits in its collectives: the least of the ranks is what the sending takes.
    exposed = [sum(map(each.loss_ms, ("dp", "tp", "collective"))) for each in joined.ranks]
    return {
        "exposed_ms": round(min(exposed), 3),
        "profiled_ms": round(joined.wall_ms, 2),
        "ledgers": [
            {"rank": each.rank, **{key: round(each.loss_ms(key), 3) for key in LOSSES if each.loss_ms(key)}}
            for each in joined.ranks
        ],
        "sent_ms": {name: round(ms, 3) for name, ms in sent.items()},
    }


SITES = {  # (joined to, rows of a rank, K, N) at tp 2 and 8192 tokens
    "8b qkv, gather": ("gather", 4096, 3072), "8b fc1, gather": ("gather", 4096, 14336),
    "8b proj dgrad, gather": ("gather", 4096, 2048), "8b fc2 dgrad, gather": ("gather", 4096, 7168),
    "8b proj, scatter": ("scatter", 2048, 4096), "8b fc2, scatter": ("scatter", 7168, 4096),
    "1b qkv, gather": ("gather", 2048, 1536), "1b fc1, gather": ("gather", 2048, 8192),
    "1b proj, scatter": ("scatter", 1024, 2048), "1b fc2, scatter": ("scatter", 4096, 2048),
}  # fmt: skip
TOKENS = 8192


def links(job: Job, sizes: Sizes) -> None:
    def all_sites(_: Environment) -> Row:
        group = job.world_group()
        providers: list[Any] = [Plain(), Chunked(2), Chunked(4)]
        refusal, turn = reserve(group, 2 * TOKENS * 4096 * 2), TOKENS * 4096 * 2
        area = open_area(group, TURNS * turn)
        if refusal is None:
            providers.append(SymmetricMemory())
        if not isinstance(area, str):
            providers.append(Pushed(area, turn))
        found: Row = {"symmetric": refusal, "pushed": area if isinstance(area, str) else None, "sites": {}}
        for site, (kind, K, N) in SITES.items():
            timer = time_gathers if kind == "gather" else time_scatters
            for bulk in (False, True):
                sites = Sites(TOKENS // group.size, ((K, N),), torch.bfloat16, bulk)
                timings = timer(providers, sites, group)
                key = f"{site}{', and bulk' if bulk else ''}"
                row = found["sites"][key] = {each.provider.name: round(each.ms, 4) for each in timings}
                whole = torch.randn(TOKENS, K, dtype=torch.bfloat16, device="cuda")
                weight = torch.randn(N, K, dtype=torch.bfloat16, device="cuda")
                row["gemms"] = round((1 + bulk) * gemm_ms(whole, weight), 4)
                row["hidden"] = round(
                    (row["plain"] - timings[0].ms) / max(row["plain"] - row["gemms"], 1e-3), 2
                )
                if job.leads:
                    job.say((key, row))
        return found

    if DEVICE == "cuda":  # nothing here is of interest without links between GPUs
        job.row("links", lambda: job.on_all(all_sites))


def gemm_ms(x: torch.Tensor, weight: torch.Tensor) -> float:
    """x W^T, the host being ahead: median of ten."""
    marks = []
    for _ in range(13):
        for _ in range(8):
            x @ weight.T
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x @ weight.T
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in marks[3:])[5]


def watch(job: Job, sizes: Sizes) -> None:
    """The last rank multiplies more in each microbatch: its own time must say so, and only its."""

    def work(environment: Environment) -> Row:
        with tempfile.TemporaryDirectory() as place:
            words = f"{sizes.small} --train-iters 9 --bf16 {DP} --log-straggler"
            recorded = f" --flight-recorder-dump-path {place}/record" if DEVICE == "cuda" else ""
            run = opened(job, words + recorded, environment)
            width = 8192 if DEVICE == "cuda" else 128
            step, x = run.make_step(), torch.randn(width, width, device=run.device, dtype=torch.bfloat16)
            inner = step._microbatch

            def slower(*args: Any) -> Any:
                if environment.rank == job.size - 1:
                    for _ in range(20):
                        x @ x
                return inner(*args)

            step._microbatch = slower  # type: ignore[method-assign]
            with closing(run.batches()) as batches:
                outcomes = [step(next(batches)) for _ in range(8)]
            own_s = sorted(outcome.own_s or 0.0 for outcome in outcomes[3:])[2]
            entries: list[Any] = []
            if recorded:
                file = write_flight_record(f"{place}/record", environment.rank, "nccl")
                entries = pickle.loads(file.read_bytes()).get("entries", [])
            mine = {
                "rank": environment.rank,
                "own_ms": 1e3 * own_s,
                "step_ms": 1e3 * outcomes[-1].time_s,
                "recorded": len(entries),
                "newest": [each.get("profiling_name") for each in entries[-3:]],
            }
            return {"ranks": every(run.groups.control, lambda: mine)}

    def told() -> Row:
        found: Row = job.on_all(work)
        if job.leads:
            job.say(found)
        return found

    job.row("watch", told)


def train_command(words: str, gpus: int, folder: Path) -> list[str]:
    """A run in its own processes; its record lies in `folder`."""
    command = [sys.executable, "-m", "redline", "train", *words.split(), "--save", str(folder)]
    return command + (["--nproc-per-node", str(gpus)] if gpus > 1 else [])


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(json.loads(line)["kind"] == "step" for line in lines if line.endswith("}"))


def kill(gpus: int, out: Path, sizes: Sizes) -> None:
    """SIGKILL to the last rank under load; then the rest of the run on one GPU less."""
    row: Row = {"row": "kill"}
    started = time.monotonic()

    def tell(**found: Any) -> None:
        row.update(found)
        print({"at_s": round(time.monotonic() - started, 1), **found}, flush=True)
        write_result(out, "parallel-kill", DEVICE, [row], os.environ.get("COMMIT"))

    with tempfile.TemporaryDirectory() as place:
        folder, said = Path(place) / "run", Path(place) / "said"
        over_all_and_one_less = 2 * gpus * max(1, gpus - 1)
        batch = over_all_and_one_less * max(1, 16 // over_all_and_one_less)
        words = f"{sizes.small} --global-batch-size {batch} --save-interval 20 --bf16 {DP}"
        endless = f"{words} --train-iters 5000"
        with said.open("w") as stderr:
            job = subprocess.Popen(train_command(endless, gpus, folder), stdout=stderr, stderr=stderr)
        while job.poll() is None and num_steps(folder) < 45 and time.monotonic() - started < START_S[DEVICE]:
            time.sleep(0.2)
        tell(s_to_start=time.monotonic() - started, steps_seen=num_steps(folder), exit=job.poll())
        ranks = children_of(job.pid)
        if job.poll() is None:
            os.kill(max(ranks), signal.SIGKILL)
        killed = time.monotonic()
        try:
            code = job.wait(timeout=75)
        except subprocess.TimeoutExpired:
            for pid in (*children_of(job.pid), job.pid):
                os.kill(pid, signal.SIGKILL)
            code = "still there after 75 s"
        tell(exit=code, s_to_end=time.monotonic() - killed, said=said.read_text()[-3000:])
        done = num_steps(folder)
        resumed = f"{words} --train-iters {done + 5} --load {folder}"
        command, said = train_command(resumed, max(1, gpus - 1), folder), Path(place) / "resumed"
        with said.open("w") as output:
            again = subprocess.run(["timeout", "60", *command], stdout=output, stderr=output)
        tell(steps_before=done, resume_exit=again.returncode, steps_after=num_steps(folder))
        if again.returncode:
            tell(resume_said=said.read_text()[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"equal": equal, "steps": steps, "links": links, "watch": watch}
    parser.add_argument("part", choices=(*parts, "kill"))
    parser.add_argument("--gpus", type=int, default=2, help="of kill; the others find their ranks")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
    parser.add_argument("--suffix", default="", help="of the result files")
    parser.add_argument("--until", type=float, default=time.time() + 600, help="end, in seconds since 1970")
    parser.add_argument("--stacks", type=Path, default=Path(tempfile.gettempdir()), help="folder of stacks")
    parser.add_argument("--dry", action="store_true", help="tiny models, to try the way on CPUs")
    options = parser.parse_args()
    samples.MOCK_DOCUMENTS = 2000  # as many as these few steps want
    sizes = DRY if options.dry else FULL
    out = options.out / f"parallel-{options.part}{options.suffix}.json"
    if options.part == "kill":
        kill(options.gpus, out, sizes)
        return
    limits = Limits(row_s=ROW_S[options.part], until=options.until, stacks=options.stacks)
    job = Job(out, options.part, options.only, limits)
    parts[options.part](job, sizes)
    job.close()


if __name__ == "__main__":
    main()
