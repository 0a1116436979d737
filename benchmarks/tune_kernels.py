"""Where the time of each fused operator goes, kernel by kernel, and what other launch choices would give.

usage: python benchmarks/tune_kernels.py OUT.json [OPERATOR ...]
(one NVIDIA GPU; about five minutes for all operators, two for the embedding alone)

Two lists. "breakdown": device time of each kernel of a forward and backward of every operator's first case;
"choices", the same total under other launch configurations than the ones written in the rooms.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from redline.bench.gate import draw
from redline.bench.kernels import QUICK, Call, cases_of
from redline.bench.turns import CACHE_BYTES
from redline.files import write_json_atomic
from redline.kernels.bench_case import BenchCase
from redline.kernels.common import RowConfig, TileConfig, apply, next_power_of_2
from redline.kernels.qk_norm import op as qk_norm_op
from redline.kernels.qk_norm.kernel import HeadConfig
from redline.kernels.qk_norm.reference import QKNormParams
from redline.kernels.rotary.kernel import HeadConfig as TurnConfig

ROUNDS = 8
ROOMS = "redline.kernels."
Choice = tuple[str, str, str, dict[str, Any]]  # operator, in words, module, what is written there otherwise


def kernel_times(case: BenchCase, device: torch.device) -> list[tuple[str, float]]:
    """(kernel, median us) in the order of launch, of a forward and backward with a cold L2 cache."""
    call = Call(case.providers["fused"](), draw(case, device))
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    for _ in range(3):
        call.both()
    torch.cuda.synchronize()
    rounds: list[list[tuple[str, float]]] = []
    for _ in range(ROUNDS):
        cache.zero_()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call.both()
            torch.cuda.synchronize()
        events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda event: event.time_range.start)
        rounds.append([(event.name[:70], event.time_range.elapsed_us()) for event in events])
    names = [name for name, _ in rounds[-1]]
    same = [found for found in rounds if len(found) == len(names)]
    return [(name, statistics.median(found[index][1] for found in same)) for index, name in enumerate(names)]


@contextmanager
def replaced(module: str, values: dict[str, Any]) -> Iterator[None]:
    """Launch choices of a room exchanged for others."""
    room = importlib.import_module(ROOMS + module)
    old = {name: getattr(room, name) for name in values}
    vars(room).update(values)
    try:
        yield
    finally:
        vars(room).update(old)


def _rows(threads_per_row: int, programs: int) -> Callable[[int], RowConfig]:
    """`threads_per_row` elements a thread, for the norms' backward."""

    def config(cols: int) -> RowConfig:
        block = next_power_of_2(cols)
        warps = min(16, max(1, block // (32 * threads_per_row)))
        return RowConfig(max(1, 512 // block), block, warps, max(1, programs // warps))

    return config


def _whole_rows(tile: int, warps: int) -> Callable[[int, bool], TileConfig]:
    """Rows of so many elements together, or one longer one."""
    return lambda cols, _: TileConfig(max(1, tile // cols), next_power_of_2(cols), warps)


def _part_of_a_row(tile: int, warps: int) -> Callable[[int, bool], TileConfig]:
    """So many elements of one row."""
    return lambda cols, _: TileConfig(1, min(tile, next_power_of_2(cols)), warps)


def embedding_choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of the lookup, of the sort behind the gradient, and of the sum over runs."""
    for rows, block, warps in ((1, 4096, 2), (1, 4096, 4), (1, 2048, 4), (2, 1024, 4), (2, 4096, 4)):
        values = {"GATHER_ROWS": rows, "GATHER_BLOCK": block, "GATHER_WARPS": warps}
        yield f"lookup: {rows} rows, {block} columns, {warps} warps", values
    yield "sort: by PyTorch", {"RANK_TOKENS": 0}
    for tile, rows in ((512, 16), (1024, 32), (2048, 16), (2048, 32)):
        yield f"sort: tiles of {tile}, {rows} rows", {"RANK_TILE": tile, "RANK_ROWS": rows}
    for rows, tiles in ((32, 8), (64, 16), (128, 16)):
        yield f"merge: {rows} rows, {tiles} tiles", {"MERGE_ROWS": rows, "MERGE_TILES": tiles}
    for rows in (1, 4, 8):
        yield f"runs: {rows} rows a step", {"RUN_ROWS": rows}
    whole = ((4096, 8, 4), (4096, 8, 2), (4096, 16, 2))
    for block, columns, rows in ((512, 8, 4), (1024, 8, 4), (2048, 8, 4), *whole):
        what = f"runs: {block} columns, {columns} a thread, {rows} rows a step"
        yield what, {"RUN_BLOCK": block, "RUN_COLUMNS": columns, "RUN_ROWS": rows}


def choices() -> Iterator[Choice]:
    """Every operator's, one after the other."""
    for op in ("rms_norm", "layer_norm"):
        for elements in (8, 16):
            for warps in (16, 32):
                what = f"backward: {elements} elements a thread, {warps} warps an SM"
                yield op, what, "norm_triton", {"backward_config": _rows(elements, warps)}
        for tile, warps in ((4096, 4), (4096, 16), (8192, 8), (16384, 8)):
            what = f"forward: tile {tile}, {warps} warps"
            yield op, what, "norm_triton", {"forward_config": _whole_rows(tile, warps)}
    for op, module in (("bias_squared_relu", "ungated_triton"), ("bias_swiglu", "gated_triton")):
        for tile, warps in ((1024, 2), (2048, 4), (2048, 8)):
            what = f"tile {tile}, {warps} warps"
            yield op, what, module, {"tile_config": _part_of_a_row(tile, warps)}
    for programs in (6, 7):
        both = {False: programs, True: programs}
        yield "qk_norm", f"{programs} programs an SM", "qk_norm.kernel", {"PROGRAMS_PER_SM": both}
    for rows, warps in ((8, 4), (32, 8)):
        heads = lambda n, g, d, r=rows, w=warps: HeadConfig(r, min(r, 8), next_power_of_2(d), w)  # noqa: E731
        yield "qk_norm", f"{rows} heads a tile, {warps} warps", "qk_norm.kernel", {"head_config": heads}
    for block, warps in ((4, 1), (8, 1), (8, 2), (16, 2)):
        turns = lambda n, half, rest, b=block, w=warps: TurnConfig(b, next_power_of_2(half), rest, w)  # noqa: E731
        yield "rotary", f"{block} heads, {warps} warps", "rotary.kernel", {"head_config": turns}
    for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4)):
        softmax = lambda cols, r=rows, w=warps: TileConfig(r, next_power_of_2(cols), w)  # noqa: E731
        what = f"{rows} rows, {warps} warps"
        yield "masked_softmax", what, "masked_softmax.kernel", {"row_config": softmax}
    for cache in (("", ""), ("evict_last", ""), ("evict_last", "evict_first"), ("", "evict_first")):
        what = f"eviction {cache}"
        yield "linear_cross_entropy", what, "linear_cross_entropy.kernel", {"CACHE": cache}
    for warps in (16, 32):
        yield "linear_cross_entropy", f"{warps} warps", "linear_cross_entropy.kernel", {"MAX_WARPS": warps}
    for warps in (4, 8, 16):
        yield "cross_entropy", f"forward: {warps} warps", "cross_entropy.kernel", {"FORWARD_WARPS": warps}
    for lanes in (512, 1024, 2048):
        yield "grad_norm", f"{lanes} lanes", "grad_norm.kernel", {"LANES": lanes}
    for programs in (8, 10, 18):
        what = f"{programs} programs an SM"
        yield "bias_dropout_add", what, "bias_dropout_add.kernel", {"PROGRAMS_PER_SM": programs}
    for tile, columns in ((2048, 1024), (2048, 2048)):
        shapes = lambda cols, _, t=tile, c=columns: TileConfig(t // c, c, 4)  # noqa: E731
        what = f"tile {tile} / {columns}"
        yield "bias_dropout_add", what, "bias_dropout_add.kernel", {"tile_config": shapes}
    for what, values in embedding_choices():
        yield "embedding", what, "embedding.kernel", values


def host_pieces() -> dict[str, float]:
    """Microseconds of the host for what an operator without a row consists of, QK norm's before all."""
    leaf = torch.empty(0, 2, 6144, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    qkv = leaf.view(0, 2, 6144)
    weight = torch.ones(128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    plain, params = qkv.detach(), QKNormParams(q_weight=weight, k_weight=weight)
    form = (32, 8, 128, False, 1e-5, False)

    def divided() -> None:
        plain.view(0, 2, 48, 128).split_with_sizes((32, 8, 8), 2)

    pieces: dict[str, Callable[[], Any]] = {
        "empty, one size": lambda: torch.empty(0, dtype=torch.bfloat16, device=plain.device),
        "empty, four sizes": lambda: torch.empty((0, 2, 32, 128), dtype=torch.bfloat16, device=plain.device),
        "new_empty, one size": lambda: plain.new_empty(0),
        "new_empty, four sizes": lambda: plain.new_empty((0, 2, 32, 128)),
        "empty_like": lambda: torch.empty_like(plain),
        "view, split": divided,
        "narrow, view": lambda: plain.narrow(2, 5120, 1024).view(0, 2, 8, 128),
        "as_strided": lambda: plain.as_strided((0, 2, 8, 128), (12288, 6144, 128, 1), 5120),
        "QKNormParams": lambda: QKNormParams(q_weight=weight, k_weight=weight),
        "qk_norm's support": lambda: qk_norm_op.supports(qkv, params, 128),
        "qk_norm's checks": lambda: qk_norm_op._check_params(params, 128, "rms"),
        "qk_norm's launcher": lambda: qk_norm_op._forward(plain, *params[:4], *form),
        "qk_norm's Function": lambda: apply(qk_norm_op.QKNormFn, qkv, *params[:4], params[4:], form),
        "qk_norm": lambda: qk_norm_op.qk_norm(qkv, params, num_heads=32, num_groups=8, head_dim=128),
    }
    found = {}
    for name, piece in pieces.items():
        times = []
        for _ in range(500):
            started = time.perf_counter()
            piece()
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times) * 1e6
    return found


def main(out: str, *only: str) -> None:
    """Measure, and write after each figure: the run may be cut short."""
    device = torch.device("cuda")
    cases = {case.op: case for case in reversed(cases_of(only, QUICK))}
    breakdown: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    host = host_pieces()
    print("host", *(f"{us:.1f} {name}" for name, us in host.items()), sep="\n   ")

    def keep() -> None:
        card = torch.cuda.get_device_name()
        result = {"device": card, "host_us": host, "breakdown": breakdown, "choices": found}
        write_json_atomic(Path(out), result)

    for op, case in cases.items():
        breakdown[op] = {"case": case.name, "kernels": kernel_times(case, device)}
        print(op, case.name, *(f"{us:.1f} {name}" for name, us in breakdown[op]["kernels"]), sep="\n   ")
        keep()
        torch.cuda.empty_cache()
    for op, what, module, values in choices():
        if op not in cases:
            continue
        try:
            with replaced(module, values):
                times = kernel_times(cases[op], device)
        except Exception as error:  # a configuration may not fit the card: that is a result too
            found.append({"op": op, "what": what, "error": f"{type(error).__name__}: {error}"[:200]})
        else:
            found.append({"op": op, "what": what, "total_us": sum(us for _, us in times), "kernels": times})
            print(f"{op}: {what}: {found[-1]['total_us']:.1f} us", flush=True)
        keep()


if __name__ == "__main__":
    main(*sys.argv[1:])
