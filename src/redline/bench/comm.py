"""Collectives over the ranks of a job, by size, and the line through them: alpha + sent bytes x beta."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.comm import Collectives, Group, close_world, gathered, open_world
from redline.config import Environment
from redline.errors import RedlineError, UsageError
from redline.formulas.fit import fit_latency_and_rate
from redline.formulas.time import Rates, collective_s
from redline.formulas.traffic import Collective, sent_bytes
from redline.hardware import MeasuredLinks, card_of, detect, write_links
from redline.hardware.links import FILE as LINKS_FILE
from redline.hardware.links import Line
from redline.plan.cost_rates import rates_of
from redline.run import choose_backend
from redline.run.ranks import meeting_of
from redline.units import format_bytes, format_duration

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
POWERS = {"cuda": range(16, 31), "cpu": range(16, 23)}  # 64 KiB to 1 GiB, or to 4 MiB
QUICK = {"cuda": range(16, 31, 2), "cpu": range(16, 21, 2)}
ROUNDS = 5
BATCH_BYTES = 1 << 26  # so much is sent between two looks at the clock,
MOST_CALLS = 20  # in no more calls than that
TIMEOUT_S = 120.0
FIT = ", fit"  # behind a collective's name: the row of its line


def bench_comm(
    environment: Environment, *, device_type: str, quick: bool, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Measure every collective; every rank of the job calls it, and the first one gets the rows.

    What GPUs of one node reach is kept in the cache folder, for the cost model (hardware/links.py).

    Raises: UsageError on one process, which has nobody to talk to.
    """
    if environment.world_size == 1:
        raise UsageError(
            "redline bench comm needs several processes.",
            why="one has nobody to talk to.",
            mend="add --nproc-per-node 2, or start it with torchrun.",
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, environment.local_rank)
        torch.cuda.set_device(device)
    backend = choose_backend(None, device).ran
    try:
        world = open_world(meeting_of(environment, TIMEOUT_S), backend, device)
        group = Group(world.control.ranks, world.rank, dist.group.WORLD)
        rates = _assumed(device_type, environment.local_world_size)
        rows: list[dict[str, Any]] = []
        for kind in KINDS:
            powers = (QUICK if quick else POWERS)[device_type]
            points = [_point(kind, 2**power, group, world.control, device, rates) for power in powers]
            fit = _fit(kind, backend, group.size, points)
            rows += [*points, fit]
            if world.rank == 0:
                say(_sentence(fit))
        if world.rank != 0:
            return []
        if device_type == "cuda" and environment.local_world_size == environment.world_size:
            keep_links(environment.cache_dir / LINKS_FILE, torch.cuda.get_device_name(), rows, say)
        return rows
    finally:
        close_world()


def keep_links(path: Path, device: str, rows: list[dict[str, Any]], say: Callable[[str], object]) -> None:
    """Keep the lines among `rows` as those of a card, and say so."""
    fits = {row["case"].removesuffix(FIT): row for row in rows if row["case"].endswith(FIT)}
    lines = {
        kind: Line(fit["alpha_s"], fit["bytes_per_s"]) for kind, fit in fits.items() if fit["bytes_per_s"]
    }
    today = datetime.date.today().isoformat()
    ranks, source = (
        next(iter(fits.values()))["ranks"],
        f"redline bench comm, {today}, torch {torch.__version__}",
    )
    try:
        write_links(path, MeasuredLinks(card=card_of(device), ranks=ranks, lines=lines, source=source))
    except OSError as error:
        say(f"the lines are not kept: {path}: {error.strerror or error}")
    else:
        say(f"kept in {path}: predictions for {card_of(device)} use these lines from now on")


def _point(
    kind: Collective, num_bytes: int, group: Group, control: Group, device: torch.device, rates: Rates | None
) -> dict[str, Any]:
    """One size: seconds of a call on the slowest rank, calls one behind the other; median of the rounds."""
    half = 2
    length = num_bytes // half // group.size * group.size
    tensor = torch.zeros(length, dtype=torch.bfloat16, device=device)
    call = _call(kind, tensor, group)
    calls = max(1, min(MOST_CALLS, BATCH_BYTES // num_bytes))
    times = []
    for number in range(ROUNDS + 1):
        _synchronize(device)
        gathered(control, 0.0)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(device)
        if number:  # the first one warms up
            times.append((time.perf_counter() - begin) / calls)
    took = max(gathered(control, statistics.median(times)))
    sent = sent_bytes(kind, length * half, group.size)
    row: dict[str, Any] = {"case": kind, "bytes": length * half, "sent_bytes": sent, "s": took}
    row["bus_bytes_per_s"] = sent / took
    if rates is not None:
        row["assumed_s"] = collective_s(rates, kind, length * half, group.size)
    return row


def _call(kind: Collective, tensor: Tensor, group: Group) -> Callable[[], object]:
    """The collective as training sends it; a send goes from the first rank to the second."""
    transport = Collectives(group)
    if kind == "all_reduce":
        return lambda: transport.all_reduce(tensor).wait()
    if kind == "all_gather":
        return lambda: transport.all_gather(tensor).wait()
    if kind == "reduce_scatter":
        return lambda: transport.reduce_scatter(tensor).wait()
    first, second, *_ = group.ranks
    if group.index == 0:
        return partial(dist.send, tensor, second)
    return partial(dist.recv, tensor, first) if group.index == 1 else lambda: None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _assumed(device_type: str, ranks_a_node: int) -> Rates | None:
    """What the cost model believes of these links; None without a data sheet."""
    try:
        return rates_of(detect(device_type), gpus_per_node=ranks_a_node)
    except RedlineError:
        return None


def _fit(kind: Collective, backend: str, ranks: int, points: list[dict[str, Any]]) -> dict[str, Any]:
    sizes, seconds = ([point[key] for point in points] for key in ("sent_bytes", "s"))
    alpha, beta = fit_latency_and_rate(sizes, seconds)
    errors = [(alpha + beta * size) / took - 1 for size, took in zip(sizes, seconds, strict=True)]
    return {
        "case": f"{kind}{FIT}",
        "backend": backend,
        "ranks": ranks,
        "alpha_s": alpha,
        "beta_s_per_byte": beta,
        "bytes_per_s": 1 / beta if beta else None,
        "largest_bytes_per_s": max(point["bus_bytes_per_s"] for point in points),
        "largest_error": max(map(abs, errors)),
    }


def _sentence(fit: dict[str, Any]) -> str:
    rate = f"{format_bytes(fit['bytes_per_s'])}/s" if fit["bytes_per_s"] else "no slope"
    return (
        f"{fit['case']} over {fit['ranks']} ranks ({fit['backend']}): "
        f"{format_duration(fit['alpha_s'])} a start, {rate}; off by {fit['largest_error']:.0%} at most"
    )
