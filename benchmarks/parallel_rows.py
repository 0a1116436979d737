"""What parallel.py measures: the layouts, as words of the command line. The most important stand first."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 4096 --seq-length 512 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --eval-iters 0"
)
DP = "--use-distributed-optimizer"
LATE = f"{DP} --no-overlap-grad-reduce --no-overlap-param-gather"
REDUCE = f"{DP} --no-overlap-param-gather"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
OPEN = (
    f"{SP} --tp-comm-overlap --tp-comm-overlap-method plain --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad"
)
AUTO = f"{SP} --tp-comm-overlap"
NO_AG, NO_RS = "--no-tp-comm-overlap-ag", "--no-tp-comm-overlap-rs"
NO_BULK = "--no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad"
FP8 = "--fp8-format hybrid"
MODULES = "--recompute-granularity selective --recompute-modules layernorm activation core_attn"
BLOCKS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def method(name: str) -> str:
    """Every joined GEMM by that method."""
    return f"{AUTO} --tp-comm-overlap-method {name}"


EQUAL = {  # precision, also of the run on one GPU -> layouts
    "--fp32": {
        "plain": "", "sharded": DP, "sharded, late": LATE, "tp": TP, "sp": SP,
        "sp, chunked": method("chunked"), "sp, symmetric": method("symmetric"),
        "sp, pushed": method("pushed"),
        "sharded, modules recomputed": f"{DP} {MODULES}", "sp, modules recomputed": f"{SP} {MODULES}",
        "sharded, blocks recomputed": f"{DP} {BLOCKS}", "sp, blocks recomputed": f"{SP} {BLOCKS}",
    },
    "--fp64": {
        "sharded": DP, "sp": SP, "sp, chunked": method("chunked"), "sp, symmetric": method("symmetric"),
        "sp, pushed": method("pushed"),
    },
    "--bf16": {"plain": "", "sharded": DP, "sp": SP, "sp, pushed": method("pushed")},
    f"--bf16 {FP8}": {"sharded": DP, "sp": SP, "sharded, modules recomputed": f"{DP} {MODULES}"},
}  # fmt: skip

MODELS = {
    "8b": "--preset llama3-8b --num-layers 8",
    "1b": "--preset llama3.2-1b",
}
LARGE = f"{DP} --ddp-bucket-size 160000000"
PUSHED = method("pushed")
# Of tensor parallelism: a microbatch of two samples, so that the host stays ahead of the halved GEMMs.
TWO = "--micro-batch-size 2"
STEPS = {
    "8b": {
        "one GPU": "",
        "sharded, no overlap": LATE,
        "sharded, both overlaps": DP,
        "sharded, buckets of 160 million": LARGE,
        "sharded, reduce overlapped": REDUCE,
        "one GPU, two samples": TWO,
        "sp, all in the open": f"{OPEN} {TWO}",
        "sp": f"{SP} {TWO}",
        "sp, auto": f"{AUTO} {TWO}",
        "sp, pushed": f"{PUSHED} {TWO}",
        "sp, pushed, gathers only": f"{PUSHED} {NO_RS} {NO_BULK} {TWO}",
        "sp, pushed, scatters only": f"{PUSHED} {NO_AG} {NO_BULK} {TWO}",
        "sp, bulk only": f"{AUTO} {NO_AG} {NO_RS} {TWO}",
        "sp, symmetric": f"{method('symmetric')} {TWO}",
        "sp, fp8": f"{SP} {FP8} {TWO}",
        "one GPU again": "",
        "sharded, both overlaps again": DP,
        "sharded, buckets of 400 million": f"{DP} --ddp-bucket-size 400000000",
        "plain": "",
        "one GPU, fp8": FP8,
        "sharded, fp8": f"{DP} {FP8}",
        "one GPU, best mix": f"{FP8} --fp8-output-proj",
        "sharded, best mix": f"{LARGE} {FP8} --fp8-output-proj",
        "one GPU, weight gradients apart": "--no-gradient-accumulation-fusion",
        "sharded, weight gradients apart": f"{DP} --no-gradient-accumulation-fusion",
    },
    "1b": {
        "one GPU": "",
        "sharded, both overlaps": DP,
        "one GPU, two samples": TWO,
        "sp, all in the open": f"{OPEN} {TWO}",
        "sp": f"{SP} {TWO}",
        "sp, auto": f"{AUTO} {TWO}",
        "sp, pushed": f"{PUSHED} {TWO}",
        "sharded, no overlap": LATE,
        "sharded, reduce overlapped": REDUCE,
        "sharded, buckets of 160 million": LARGE,
        "plain": "",
        "sharded, fp8": f"{DP} {FP8}",
        "sharded, weight gradients apart": f"{DP} --no-gradient-accumulation-fusion",
    },
}


def steps_words(model: str, layout: str, gpus: int) -> str:
    """The run of a layout: two samples of 8192 tokens on every rank, or on both tensor-parallel ones."""
    samples = 2 if TP in layout else 2 * gpus
    return (
        f"{MODELS[model]} --seq-length 8192 --micro-batch-size 1 --global-batch-size {samples} --mock-data "
        f"--eval-iters 0 --bf16 {layout}"
    )
