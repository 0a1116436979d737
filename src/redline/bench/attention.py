"""Every attention backend on a grid of shapes: checked, then timed in turns; does `auto` take the best?

A row of the result holds each backend's forward and backward seconds and rates (a causal mask counts half,
the documents of a packed row alone), the kernels that ran by name, and the card's clock and power after it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.attention import (
    BACKENDS,
    Attention,
    Calibration,
    Request,
    flash_attention,
    select_backend,
    supports,
    unfused_attention,
)
from redline.attention.probe import Inputs, mask_of
from redline.attention.timing import Timing, document_lengths, measure
from redline.bench.device import clocks, kernel_times
from redline.bench.gate import Gate, check
from redline.bench.record import Keep
from redline.errors import ConfigError
from redline.formulas.flops import attention_pass_flops
from redline.hardware import detect
from redline.kernels.bench_case import BenchCase
from redline.units import format_duration

TOKENS = 16384  # of a row of the grid; longer sequences are one sample
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK_LENGTHS = (2048, 8192)
GATE_LENGTH = 1000  # no multiple of any tile
SCORES_BYTES = 8 << 30  # up to which the plain steps take part
TORCH_FLASH = "torch-flash"  # PyTorch's own kernel, also where a package stands for `flash`


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the grid."""

    head_dim: int
    num_heads: int
    num_groups: int
    seq_length: int
    batch: int
    packed: bool

    @property
    def name(self) -> str:
        """For people: "head 128, 8192 x 2, 32/8 heads, packed"."""
        heads = f"{self.num_heads}/{self.num_groups} heads"
        packed = ", packed" if self.packed else ""
        return f"head {self.head_dim}, {self.seq_length} x {self.batch}, {heads}{packed}"

    def request(self, device_type: str) -> Request:
        """What a run of this shape would ask: causal, bf16 on a GPU."""
        return Request(
            device_type=device_type,
            dtype=torch.bfloat16 if device_type == "cuda" else torch.float32,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            seq_length=self.seq_length,
            batch=self.batch,
            packed=self.packed,
        )


def shapes(device_type: str, *, quick: bool) -> Iterator[Shape]:
    """The grid. On a CPU a few small shapes, which show that it works."""
    if device_type != "cuda":
        yield Shape(16, 4, 2, 64, 2, False)
        yield Shape(16, 4, 2, 128, 1, True)
        return
    for head_dim in (64, 128):
        for num_groups in (8,) if quick else (32, 8):
            for seq_length in QUICK_LENGTHS if quick else LENGTHS:
                batch = max(1, TOKENS // seq_length)
                yield Shape(head_dim, 32, num_groups, seq_length, batch, False)
                if not quick or seq_length == max(QUICK_LENGTHS):
                    yield Shape(head_dim, 32, num_groups, max(TOKENS, seq_length), 1, True)


def bench_attention(
    device_type: str,
    *,
    quick: bool,
    calibration: Path,
    say: Callable[[str], object],
    keep: Keep,
) -> list[dict[str, Any]]:
    """Check and time the grid; a shape that fails costs its row alone.

    Args:
        keep: given the rows there are after each of them.
    """
    peak = detect(device_type).peak("bf16")
    store = Calibration(calibration, say)
    rows: list[dict[str, Any]] = []
    gates: dict[tuple[str, int, int, bool], Gate] = {}
    grid = list(dict.fromkeys(shapes(device_type, quick=quick)))
    if device_type == "cuda":
        compile_ahead(grid, say)
    for shape in grid:
        rows.append(_row(shape, device_type, store, peak, gates))
        say(_sentence(rows[-1]))
        keep(rows)
    return rows


def compile_ahead(grid: list[Shape], say: Callable[[str], object]) -> None:
    """Compile the kernels of the grid in several processes: the caches on disk then have them.

    Without it most of the time would go to compilers, one kernel after the other. What fails here fails again
    in its row, which says so.
    """
    kinds = {(each.head_dim, each.num_groups, each.packed): each for each in grid}
    started = time.perf_counter()
    with ProcessPoolExecutor(
        min(len(kinds), os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as pool:
        for done in [pool.submit(_compile, shape) for shape in kinds.values()]:
            done.exception()
    took = format_duration(time.perf_counter() - started)
    say(f"kernels of {len(kinds)} kinds of shapes are compiled, in {took}")


def _compile(shape: Shape) -> None:
    """Run every backend once, on the smallest shape of its kind."""
    request = shape.request("cuda")
    for attention in _candidates(request)[0].values():
        with suppress(RuntimeError):
            gate(attention, request)


def all_right(rows: list[dict[str, Any]]) -> bool:
    """Whether every backend that was timed passed its check."""
    return all(each.get("gate", {}).get("passed", True) for row in rows for each in row["backends"].values())


def _row(
    shape: Shape,
    device_type: str,
    store: Calibration,
    peak: float | None,
    gates: dict[tuple[str, int, int, bool], Gate],
) -> dict[str, Any]:
    request = shape.request(device_type)
    backends, found = _candidates(request)
    for name, attention in list(backends.items()):
        key = (name, shape.head_dim, shape.num_groups, shape.packed)
        if key not in gates:
            gates[key] = gate(attention, request)
        found[name]["gate"] = gates[key].as_dict()
        if not gates[key].passed:
            del backends[name]
    flops = attention_pass_flops(document_lengths(request), shape.num_heads, shape.head_dim)
    for name, timing in measure(backends, request).items():
        found[name] |= _rates(timing, [each * shape.batch for each in flops], peak)
        if timing.failed is None and device_type == "cuda":
            inputs = Inputs(request, document_lengths(request), request.batch)
            times = kernel_times(partial(inputs.step, backends[name]))
            found[name]["kernels"] = [each.as_dict() for each in times]
    row = {"case": shape.name, "shape": asdict(shape), "backends": found, "clocks": clocks(device_type)}
    return row | {"auto": _auto(request, store, found)}


def _candidates(request: Request) -> tuple[dict[str, Attention], dict[str, dict[str, Any]]]:
    """The backends that take the request, and for each of all what it is or why it does not."""
    backends: dict[str, Attention] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, backend in BACKENDS.items():
        reason = supports(name, request)
        scores = request.batch * request.num_heads * request.seq_length**2 * 4
        if name == "local" and request.device_type == "cpu":
            reason = reason or "interpreted on a CPU: no time would mean anything"
        if name == "unfused" and scores > SCORES_BYTES:
            reason = "its scores are left out above 8 GiB"
        if reason:
            found[name] = {"error": reason}
            continue
        backends[name] = backend.make(request)
        found[name] = {"what": backend.what(request)}
    if "flash" in backends and backends["flash"] is not flash_attention and not request.packed:
        backends[TORCH_FLASH], found[TORCH_FLASH] = flash_attention, {"what": "PyTorch's flash kernel"}
    return backends, found


def gate(attention: Attention, request: Request) -> Gate:
    """Whether the backend is right at this head size: its error against float64 beside the plain steps'."""
    length = min(request.seq_length, GATE_LENGTH)
    small = replace(
        request, seq_length=length, batch=1, num_heads=request.num_heads // request.num_groups * 2
    )
    small = replace(small, num_groups=2) if request.num_groups > 1 else replace(small, num_groups=1)
    lengths = document_lengths(small)
    sizes = [n * small.head_dim for n in (small.num_heads, small.num_groups, small.num_groups)]

    def make_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor]:
        return (Inputs(replace(small, dtype=dtype), lengths, 1).qkv_SBX,)

    def call(backend: Attention) -> Callable[[Tensor], Tensor]:
        mask = mask_of(small, lengths, 1)

        def run(qkv_SBX: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, small.head_dim)) for part in qkv_SBX.split(sizes, dim=-1))
            return backend(q, k, v, mask, softmax_scale=small.head_dim**-0.5)

        return run

    case = BenchCase(
        op="attention",
        name="",
        make_inputs=make_inputs,
        providers={"fused": lambda: call(attention), "eager": lambda: call(unfused_attention)},
        bytes_forward=0,
        dtype=small.dtype,
    )
    return check(case, torch.device(small.device_type))


def _rates(timing: Timing, flops: list[int], peak: float | None) -> dict[str, Any]:
    if timing.failed is not None:
        return {"error": timing.failed}
    seconds = (timing.forward_s, timing.backward_s)
    rates: dict[str, Any] = {}
    for word, count, taken in zip(("forward", "backward"), flops, seconds, strict=True):
        rates[f"{word}_s"] = taken
        rates[f"{word}_flops_per_s"] = count / taken
        rates[f"{word}_share_of_peak"] = None if peak is None else count / taken / peak
    return rates


def _auto(request: Request, store: Calibration, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `auto` takes, and its time over the best one's (1.0: it is the best)."""
    try:
        _, choice = select_backend("auto", request, store)
    except ConfigError as error:
        return {"error": str(error)}
    totals = {
        name: each["forward_s"] + each["backward_s"] for name, each in found.items() if "forward_s" in each
    }
    chosen = totals.get(choice.ran)
    over = chosen / min(totals.values()) if chosen is not None else None
    return {"ran": choice.ran, "why": choice.why, "over_best": over}


def _sentence(row: dict[str, Any]) -> str:
    """The row in a line: forward / backward TFLOP/s of each backend, and what auto took."""
    parts = [
        f"{name} {each['forward_flops_per_s'] / 1e12:.3g}/{each['backward_flops_per_s'] / 1e12:.3g}"
        for name, each in row["backends"].items()
        if "forward_s" in each
    ]
    auto = row["auto"]
    over = auto.get("over_best")
    taken = f"auto {auto.get('ran', 'none')}" + (f" ({over:.3f} of the best)" if over else "")
    return f"{row['case']}: {', '.join(parts)} TFLOP/s; {taken}"
