"""Where the time of each fused operator goes, kernel by kernel, and what other launch choices would give.

usage: python benchmarks/tune_kernels.py OUT.json [OPERATOR ...]
(one NVIDIA GPU; five minutes for the first case of all operators; every case of operators that are named)

Two lists. "breakdown": device time of each kernel of a forward and backward of every case; "choices": a
forward, and both passes, as the rooms have them written and under other launch configurations, in turns.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from redline.bench.gate import draw
from redline.bench.kernels import FULL, QUICK, Call, Copies, cases_of
from redline.bench.turns import CACHE_BYTES, CudaClock, take_turns
from redline.files import write_json_atomic
from redline.kernels.bench_case import BenchCase
from redline.kernels.common import RowConfig, TileConfig, apply, next_power_of_2
from redline.kernels.qk_norm import op as qk_norm_op
from redline.kernels.qk_norm.kernel import HeadConfig
from redline.kernels.qk_norm.reference import QKNormParams
from redline.kernels.rotary.kernel import HeadConfig as TurnConfig
from redline.kernels.wide_norm_triton import WIDE

ROUNDS = 8  # under the profiler, which says what each kernel takes
AS_WRITTEN = "as written"
TILES = (
    (1, 1024, 2),
    (1, 1024, 4),
    (2, 512, 4),
    (2, 1024, 4),
    (2, 1024, 8),
    (4, 512, 8),
    (1, 2048, 4),
    (1, 2048, 8),
)
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


def in_turns(case: BenchCase, device: torch.device, others: Sequence[Choice]) -> list[dict[str, Any]]:
    """Microseconds of a forward and of both passes, with their errors: as written, and by each other choice.

    A choice that fails has its error in place of them: the card may not hold it.
    """
    call = Call(case.providers["fused"](), draw(case, device))
    passes = {"forward": call.forward, "both": call.both}
    ways = {AS_WRITTEN: ("common", {})} | {what: (module, values) for _, what, module, values in others}

    def run(what: str, name: str) -> None:
        module, values = ways[what]
        with replaced(module, values):
            passes[name]()

    rows: dict[str, dict[str, Any]] = {
        what: {"case": case.name, "op": case.op, "what": what} for what in ways
    }
    for what, row in rows.items():
        try:
            for _ in range(3):
                run(what, "both")
            torch.cuda.synchronize()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
    able = [what for what, row in rows.items() if "error" not in row]
    clock, copies = CudaClock(device), Copies(device).calls(case.bytes_forward)
    for name in passes if case.bytes_backward else ("forward",):
        found = take_turns(
            {what: partial(run, what, name) for what in able} | copies, FULL.rounds_of(case), clock
        )
        for what in able:
            turns = found[what]
            rows[what] |= {
                f"{name}_us": turns.seconds * 1e6,
                f"{name}_error_us": (turns.error_s or 0.0) * 1e6,
            }
            rows[what][f"{name}_copy_us"] = found["copy"].seconds * 1e6
    return list(rows.values())


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


def _tile(rows: int, columns: int, warps: int) -> Callable[..., TileConfig]:
    """Of an elementwise operator, whatever its room asks for."""
    return lambda cols, *_: TileConfig(rows, min(columns, next_power_of_2(cols)), warps)


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
        for chunk, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16)):
            chunks = lambda cols, layer, c=chunk, w=warps: TileConfig(1, c, w)  # noqa: E731
            what = f"forward: chunks of {chunk}, {warps} warps"
            yield op, what, "wide_norm_triton", {"wide_config": chunks}
    elementwise = {
        "bias_squared_relu": "ungated_triton",
        "bias_gelu": "ungated_triton",
        "bias_swiglu": "gated_triton",
        "bias_geglu": "gated_triton",
        "bias_dropout_add": "bias_dropout_add.kernel",
    }
    for op, module in elementwise.items():
        for rows, columns, warps in TILES:
            what = f"tile {rows} x {columns}, {warps} warps"
            yield op, what, module, {"tile_config": _tile(rows, columns, warps)}
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
    for programs, stages in ((8, 4), (16, 1), (16, 3)):
        values = {"SUM_PROGRAMS_PER_SM": programs, "SUM_STAGES": stages}
        what = f"a sum alone: {programs} programs an SM, {stages} stages"
        yield "bias_dropout_add", what, "bias_dropout_add.kernel", values
    for what, values in embedding_choices():
        yield "embedding", what, "embedding.kernel", values


def concerns(choice: Choice, case: BenchCase) -> bool:
    """Whether the case launches what the choice is about: a norm holds its rows, or reads wide ones again."""
    op, _, module, values = choice
    if op != case.op or (module != "wide_norm_triton" and "forward_config" not in values):
        return op == case.op
    read_again = not case.name.startswith("residual") and int(case.name.split()[-1]) > WIDE
    return read_again == (module == "wide_norm_triton")


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
    """Measure, and write after each case: the run may be cut short."""
    device = torch.device("cuda")
    breakdown: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    host = host_pieces()
    print("host", *(f"{us:.1f} {name}" for name, us in host.items()), sep="\n   ")
    for case in cases_of(only, FULL if only else QUICK):
        kernels = kernel_times(case, device)
        breakdown.append({"op": case.op, "case": case.name, "kernels": kernels})
        print(case.op, case.name, *(f"{us:.1f} {name}" for name, us in kernels), sep="\n   ")
        rows = in_turns(case, device, [choice for choice in choices() if concerns(choice, case)])
        for row in sorted(rows, key=lambda row: row.get("forward_us", 0.0)):
            print(f"   {row['what']}:", row.get("error") or _in_words(row), flush=True)
        found += rows
        card = torch.cuda.get_device_name()
        write_json_atomic(
            Path(out), {"device": card, "host_us": host, "breakdown": breakdown, "choices": found}
        )
        torch.cuda.empty_cache()


def _in_words(row: dict[str, Any]) -> str:
    names = [name for name in ("forward", "both") if f"{name}_us" in row]
    return ", ".join(f"{name} {row[f'{name}_us']:.2f} +- {row[f'{name}_error_us']:.2f} us" for name in names)


if __name__ == "__main__":
    main(*sys.argv[1:])
