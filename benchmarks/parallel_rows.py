"""What parallel.py measures: the layouts, as words of the command line. The most important stand first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

DP = "--use-distributed-optimizer"
LATE = f"{DP} --no-overlap-grad-reduce --no-overlap-param-gather"
REDUCE = f"{DP} --no-overlap-param-gather"
TWICE = "--num-distributed-optimizer-instances 2"
LARGE = f"{DP} --ddp-bucket-size 160000000"
AUTO = "--tp-comm-overlap"
NO_AG, NO_RS = "--no-tp-comm-overlap-ag", "--no-tp-comm-overlap-rs"
NO_BULK = "--no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad"
FP8 = "--fp8-format hybrid"
MODULES = "--recompute-granularity selective --recompute-modules layernorm activation core_attn"
BLOCKS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Of tensor parallelism: a microbatch of two samples, so that the host stays ahead of the halved GEMMs.
TWO = "--micro-batch-size 2"


def sp(ranks: int) -> str:
    """So many ranks share matrices and sequence."""
    return f"--tensor-model-parallel-size {ranks} --sequence-parallel"


def method(name: str) -> str:
    """Every joined GEMM by that method."""
    return f"{AUTO} --tp-comm-overlap-method {name}"


OPEN = f"{method('plain')} {NO_BULK}"
METHODS = {  # after "sp"
    "": "", ", chunked": method("chunked"), ", symmetric": method("symmetric"), ", pushed": method("pushed"),
    ", auto": AUTO,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is trained: by a row of `equal`, `watch` and `kill`, and by one of `steps`."""

    small: str
    models: dict[str, str]
    seq_length: int


FULL = Sizes(
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 4096 --seq-length 512 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --eval-iters 0",
    {"8b": "--preset llama3-8b --num-layers 8", "1b": "--preset llama3.2-1b"},
    8192,
)
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --vocab-size 512"
DRY = Sizes(  # on CPUs, to try the whole way
    f"{TINY} --seq-length 32 --mock-data --micro-batch-size 2 --global-batch-size 16 --train-iters 2 "
    "--eval-iters 0",
    {"8b": TINY, "1b": TINY},
    32,
)

PRECISIONS = {"fp32": "--fp32", "bf16": "--bf16", "fp8": f"--bf16 {FP8}", "fp64": "--fp64"}


def refused(precision: str, words: str) -> bool:
    """Whether the start refuses that: these methods multiply 16 bits or more."""
    return precision == "fp8" and words in (METHODS[", pushed"], METHODS[", symmetric"])


def equal_rows(gpus: int) -> Iterator[tuple[str, str, str]]:
    """(name, precision, words beside it) of runs that must lose as one GPU does."""
    three = ("fp32", "bf16", "fp8")
    for suffix, recompute in (("", ""), (", modules recomputed", MODULES)):
        for precision in three:
            for name, words in METHODS.items():
                if refused(precision, words):
                    continue
                yield (
                    f"{precision}, tp {gpus}, sp{name}{suffix}",
                    precision,
                    f"{sp(gpus)} {words} {recompute}",
                )
    for precision in three:
        yield f"{precision}, dp {gpus}, sharded", precision, DP
        if gpus >= 4:
            yield f"{precision}, dp {gpus}, two instances", precision, f"{DP} {TWICE}"
            yield f"{precision}, dp {gpus}, two instances, late", precision, f"{LATE} {TWICE}"
            for name, words in METHODS.items():
                both = f"tp 2 x dp {gpus // 2}"
                if not refused(precision, words):
                    yield f"{precision}, {both}, sp{name}", precision, f"{DP} {sp(2)} {words}"
    for precision in three:
        joined = ", chunked" if precision == "fp8" else ", pushed"
        words = f"{sp(gpus)} {METHODS[joined]} {BLOCKS}"
        yield f"{precision}, tp {gpus}, sp, blocks recomputed", precision, f"{sp(gpus)} {BLOCKS}"
        yield f"{precision}, tp {gpus}, sp{joined}, blocks recomputed", precision, words
        yield f"{precision}, dp {gpus}, sharded, modules recomputed", precision, f"{DP} {MODULES}"
        yield f"{precision}, dp {gpus}, sharded, blocks recomputed", precision, f"{DP} {BLOCKS}"
        yield f"{precision}, dp {gpus}, plain", precision, ""
        yield f"{precision}, dp {gpus}, sharded, late", precision, LATE
    yield f"fp32, tp {gpus}", "fp32", f"--tensor-model-parallel-size {gpus}"
    yield f"fp64, dp {gpus}, sharded", "fp64", DP
    if gpus >= 4:
        yield f"fp64, dp {gpus}, two instances", "fp64", f"{DP} {TWICE}"
    for name, words in METHODS.items():
        yield f"fp64, tp {gpus}, sp{name}", "fp64", f"{sp(gpus)} {words}"


def steps_rows(gpus: int) -> Iterator[tuple[str, str, int, str]]:
    """(model, name, ranks, words) of runs that are timed; one GPU's stand first, held against all."""
    fewer = [2**power for power in range(1, gpus.bit_length()) if 2**power <= gpus]
    for model in ("1b", "8b"):
        yield model, "one GPU", 1, ""
        for ranks in fewer:
            yield model, f"{ranks} GPUs, sharded", ranks, DP
    for model, ranks in dict.fromkeys((("1b", 2), ("8b", gpus), ("1b", gpus))):
        place = f"tp {ranks}, sp"
        yield model, "one GPU, two samples", 1, TWO
        yield model, f"{place}, all in the open", ranks, f"{sp(ranks)} {OPEN} {TWO}"
        for name in ("pushed", "symmetric"):
            yield model, f"{place}, {name}", ranks, f"{sp(ranks)} {method(name)} {TWO}"
        yield model, f"{place}, auto", ranks, f"{sp(ranks)} {AUTO} {TWO}"
        yield model, place, ranks, f"{sp(ranks)} {TWO}"
    yield "8b", f"{gpus} GPUs, sharded, no overlap", gpus, LATE
    if gpus >= 4:
        yield "8b", f"{gpus} GPUs, two instances", gpus, f"{DP} {TWICE}"
        yield "8b", f"{gpus} GPUs, two instances, no overlap", gpus, f"{LATE} {TWICE}"
        for model in ("8b", "1b"):
            for name, words in (("all in the open", OPEN), ("pushed", METHODS[", pushed"])):
                place = f"tp 2 x dp {gpus // 2}, sp"
                yield model, f"{place}, {name}", gpus, f"{DP} {sp(2)} {words} {TWO}"
    yield from _rest(gpus)


def _rest(gpus: int) -> Iterator[tuple[str, str, int, str]]:
    """What was measured on two GPUs before, as far as the time goes."""
    pushed = f"{sp(gpus)} {METHODS[', pushed']} {TWO}"
    more = {
        f"{gpus} GPUs, sharded, reduce overlapped": REDUCE,
        f"{gpus} GPUs, sharded, buckets of 160 million": LARGE,
        f"{gpus} GPUs, plain": "",
        f"{gpus} GPUs, sharded, fp8": f"{DP} {FP8}",
        f"{gpus} GPUs, sharded, weight gradients apart": f"{DP} --no-gradient-accumulation-fusion",
        f"tp {gpus}, sp, fp8": f"{sp(gpus)} {FP8} {TWO}",
        f"tp {gpus}, sp, fp8, plain": f"{sp(gpus)} {FP8} {method('plain')} {TWO}",
        f"tp {gpus}, sp, fp8, chunked": f"{sp(gpus)} {FP8} {method('chunked')} {TWO}",
        f"tp {gpus}, sp, fp8, auto": f"{sp(gpus)} {FP8} {AUTO} {TWO}",
        f"tp {gpus}, sp, pushed, gathers only": f"{pushed} {NO_RS} {NO_BULK}",
        f"tp {gpus}, sp, pushed, scatters only": f"{pushed} {NO_AG} {NO_BULK}",
        f"tp {gpus}, sp, bulk only": f"{sp(gpus)} {AUTO} {NO_AG} {NO_RS} {TWO}",
    }
    for model in ("8b", "1b"):
        yield model, "one GPU, fp8", 1, FP8
        yield model, "one GPU, weight gradients apart", 1, "--no-gradient-accumulation-fusion"
        for name, words in more.items():
            yield model, name, gpus, words
    mix = f"{FP8} --fp8-output-proj"
    yield "8b", "one GPU, best mix", 1, mix
    yield "8b", f"{gpus} GPUs, sharded, best mix", gpus, f"{LARGE} {mix}"
    yield "8b", "one GPU again", 1, ""
    yield "8b", f"{gpus} GPUs, sharded again", gpus, DP


def steps_words(sizes: Sizes, model: str, layout: str, ranks: int) -> str:
    """The run of a layout: two samples a step on every data-parallel rank."""
    words = layout.split()
    tp = int(words[words.index("--tensor-model-parallel-size") + 1]) if "--sequence-parallel" in words else 1
    return (
        f"{sizes.models[model]} --seq-length {sizes.seq_length} --micro-batch-size 1 --global-batch-size "
        f"{2 * ranks // tp} --mock-data --eval-iters 0 --bf16 {layout}"
    )
