"""The forms of the kernels that are launched, for sm90.py: what each is compiled for, and must be."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

SHARED = 232_448  # of an SM, for one program


@dataclass(frozen=True)
class Kernel:
    """One compilation.

    Attributes:
        place: "module:kernel" under redline.kernels.
        pointers: name (without _ptr) -> element type; left out pointers are None.
        constants: the constexpr arguments. Others are i32, divisible by 16 but for ODD, or fp32 in FLOATS.
        wide: whether every access of the activations must be 16 bytes wide.
        registers: what a thread is held to, as the launcher does; it must do without local memory.
        tile: which of the casts' TILES is launched: rows, columns, warps and so on are then its own.
        draws: whether every 16-byte load must be on its way before the mask is drawn.
        ahead: whether it must be before the first exponential is taken.
        odd: arguments that are not divisible by 16, beside ODD.
        shared: bytes of shared memory that it may take, so that as many programs as planned share an SM.
        spills: whether it may use local memory.
    """

    place: str
    pointers: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    wide: bool = True
    registers: int | None = None
    tile: str | None = None
    draws: bool = False
    ahead: bool = False
    odd: frozenset[str] = frozenset()
    shared: int = SHARED
    spills: bool = False


FLOATS = {"eps", "scale", "limit", "shift", "label_share", "other_share", "z_loss"}
FLOATS |= {"beta1", "one_minus_beta1", "beta2", "one_minus_beta2"}
ODD = {
    "splits",
    "batch",
    "threshold",
    "q_tiles",
    "a_rows",
    "b_rows",
    "heads",
    "groups",
    "q_programs",
    "k_programs",
}  # not divisible by 16
# Rows that begin anywhere, as those of a part of a tensor may.
ODD_ROWS = frozenset({"rows", "x_stride", "dy_stride", "q_stride", "x_ptr", "dy_ptr"})
NORM_F = {"x": "bf16", "residual": "bf16", "weight": "bf16", "y": "bf16", "sum": "bf16", "rstd": "fp32"}
NORM_B = {
    "dy": "bf16",
    "dsum": "bf16",
    "x": "bf16",
    "weight": "bf16",
    "rstd": "fp32",
    "dx": "bf16",
    "dweight": "fp32",
}
LOSS = {"logits": "bf16", "labels": "i64", "weights": "fp32"}
LOSS_ROW = {"SMOOTHED": True, "WEIGHTED": True, "LANES": 256, "WIDTH": 8}  # a label's logit is read alone
STRIP = {"dy": "bf16", "x": "bf16", "bias": "bf16", "dx": "bf16", "partial": "fp32"}
DRAW = {"key": "i64", "iteration": "i64", "sample": "i64"}
TABLE = {"cos": "fp32", "sin": "fp32"}
TILE = {"BLOCK_ROWS": 2, "BLOCK_COLS": 1024}
ROW = {"ZERO_CENTERED": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 4096}
HEADS = {"INTERLEAVED": False, "HALF": 64, "REST": 0, "BLOCK_HEADS": 8, "BLOCK_HALF": 64, "BLOCK_REST": 0}
QK = {"LAYER": True, "ZERO_CENTERED": False, "HEADS": 8, "BLOCK_ROWS": 16, "BLOCK_DIM": 128}
QK_B = dict.fromkeys(("dq", "dk", "dv", "qkv", "dqkv", "q_weight", "k_weight"), "bf16") | {"partial": "fp32"}
ADAM = {
    "param": "bf16", "main": "i16", "grad": "fp32", "exp_avg": "u8", "exp_avg_sq": "u8", "exp_avg_top": "i16",
    "exp_avg_sq_top": "i16", "hyper": "fp64", "grad_factor": "fp64", "found_inf": "fp64", "starts": "i64",
    "groups": "i32", "first": "i32",
}  # fmt: skip
ADAM_FORM = {"REMAINDER": True, "NOISY": True, "PER": 64, "BLOCK": 1024}
FP8_STATE = {"scale": "fp32", "amax": "fp32"}
FP8_SQUARE = {"BLOCK_ROWS": 128, "BLOCK_COLS": 128}
BLOCKS = {"q": "fp8e4nv", "qt": "fp8e4nv", "inverse": "fp32", "inverse_t": "fp32"}
FP8_ROW = {"BLOCK_ROWS": 1, "BLOCK_COLS": 4096}
FP8_GATE = {"KIND": "silu", "GATED": True, "LIMIT": None, "SHIFT": 0.0, "MAX": 0.0}
FP8_LIMITED = {"KIND": "quick", "LIMIT": 7.0, "SHIFT": 1.0}
FP8_BACKWARD = {"dy": "bf16", "x": "bf16", "q": "fp8e5", "qt": "fp8e5"} | FP8_STATE
FP8_BIAS = {"bias": "bf16", "partial": "fp32"}
FP8_FORMS: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (  # as FP8_BACKWARDS
    ("activation backward", {"q": "fp8e4nv", "qt": "fp8e4nv"}, {}),
    ("activation backward", {"dy": "fp16", "x": "fp16"}, {}),
    ("biased gated activation backward", FP8_BIAS | {"dy": "fp32", "x": "fp32"}, {"KIND": "tanh"}),
    ("biased gated activation backward", FP8_BIAS, {}),
    ("biased activation backward", FP8_BIAS, {"KIND": "exact", "GATED": False}),
    ("biased activation backward", FP8_BIAS, {"KIND": "relu2", "GATED": False}),
)
FP8_BACKWARDS: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (  # tile, more pointers, form
    ("activation backward", {}, {}),
    ("activation backward", {}, {"KIND": "tanh", "GATED": False}),
    ("activation backward", {}, FP8_LIMITED),
    ("biased activation backward", FP8_BIAS, {"KIND": "tanh", "GATED": False}),
    ("biased gated activation backward", FP8_BIAS, FP8_LIMITED),
)

KERNELS = (
    Kernel(  # a top is 2 bytes, and the only access so narrow
        "adamw.kernel:_adamw_kernel",
        ADAM,
        ADAM_FORM,
        wide=False,
    ),
    Kernel(
        "adamw.kernel:_adamw_kernel",
        {name: kind for name, kind in ADAM.items() if "_top" not in name}
        | {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
        ADAM_FORM | {"PER": 1024},
    ),
    Kernel("norm_triton:_norm_fwd_kernel", NORM_F, ROW, 8),
    Kernel("norm_triton:_norm_bwd_kernel", NORM_B, ROW | {"STAGES": 3}, 8, registers=128),
    *(
        Kernel(
            "wide_norm_triton:_wide_norm_fwd_kernel",
            {name: NORM_F[name] for name in ("x", "weight", "y", "rstd")} | statistics,
            {"ZERO_CENTERED": True, "CHUNKS": chunks, "CHUNK": chunk},
            warps,
        )
        for statistics, chunks, chunk, warps in (
            ({}, 2, 4096, 16),
            ({"bias": "bf16", "mean": "fp32"}, 2, 4096, 8),
            ({"bias": "bf16", "mean": "fp32"}, 5, 1024, 4),
        )
    ),
    Kernel(
        "norm_triton:_norm_fwd_kernel", NORM_F | {"bias": "bf16", "mean": "fp32"}, ROW | {"BLOCK_ROWS": 2}, 8
    ),
    Kernel(
        "norm_triton:_norm_bwd_kernel",
        NORM_B | {"mean": "fp32", "dbias": "fp32"},
        ROW | {"STAGES": 3},
        8,
        registers=128,
        shared=SHARED // 2,
    ),
    *(  # in fp32, with the gradient of the sum: the most that is on its way
        Kernel(
            "norm_triton:_norm_bwd_kernel",
            dict.fromkeys(NORM_B, "fp32"),
            ROW | {"STAGES": 3, "BLOCK_COLS": cols},
            warps,
            wide=not odd,
            registers=128,
            odd=odd,
            spills=bool(odd),  # rows that may begin anywhere are not asked to be fast
            shared=SHARED // programs,
        )
        for cols, warps, programs in ((8192, 16, 1), (4096, 8, 2), (2048, 4, 4))
        for odd in (frozenset[str](), frozenset({"cols", "x_stride", "dy_stride", "dsum_stride"}))
    ),
    Kernel(
        "embedding.kernel:_gather_kernel",
        {"tokens": "i64", "weight": "bf16", "out": "bf16"},
        {"POSITIONS": False, "WHOLE": True, "ROWS": 2, "BLOCKS": 4, "BLOCK": 1024},
        2,
    ),
    Kernel(
        "embedding.kernel:_gather_kernel",
        {"tokens": "i64", "weight": "bf16", "positions": "i64", "position_weight": "bf16", "out": "bf16"},
        {"POSITIONS": True, "WHOLE": False, "ROWS": 2, "BLOCKS": 2, "BLOCK": 1024},
    ),
    Kernel(
        "embedding.kernel:_sort_tiles_kernel",
        {"ids": "i64", "keys": "i32"},
        {"TILE": 1024, "ROWS": 16},
        wide=False,
    ),
    Kernel(
        "embedding.kernel:_merge_tiles_kernel",
        {"keys": "i32", "entries": "i64"},
        {"TILE": 1024, "STEPS": 10, "ROWS": 32, "TILES": 16},
        wide=False,
    ),
    Kernel(
        "embedding.kernel:_run_kernel",
        {"entries": "i64", "dout": "bf16", "main_grad": "fp32"},
        {"ROWS": 2, "BLOCKS": 2, "BLOCK": 2048},
    ),
    Kernel(
        "gated_triton:_gated_fwd_kernel",
        {"x": "bf16", "y": "bf16"},
        TILE | {"STRIPS": 7, "FAST": True, "BLOCK_ROWS": 1, "KIND": "silu", "CLAMP": True},
    ),
    Kernel(
        "gated_triton:_gated_bwd_kernel",
        STRIP,
        TILE | {"STRIPS": 7, "FAST": True, "BLOCK_ROWS": 1, "KIND": "tanh", "CLAMP": False, "NUM_STAGES": 3},
    ),
    Kernel(
        "ungated_triton:_ungated_fwd_kernel",
        {"x": "bf16", "bias": "bf16", "y": "bf16"},
        TILE | {"STRIPS": 7, "FAST": True, "KIND": "exact"},
    ),
    Kernel(
        "ungated_triton:_ungated_fwd_kernel",
        {"x": "bf16", "bias": "bf16", "y": "bf16"},
        TILE | {"STRIPS": 7, "FAST": True, "BLOCK_ROWS": 1, "KIND": "relu2"},
    ),
    Kernel(
        "ungated_triton:_ungated_bwd_kernel",
        STRIP,
        TILE | {"STRIPS": 7, "FAST": True, "KIND": "tanh", "NUM_STAGES": 3},
    ),
    Kernel(
        "ungated_triton:_ungated_bwd_kernel",
        STRIP,
        TILE | {"STRIPS": 7, "FAST": True, "KIND": "relu2", "NUM_STAGES": 3},
    ),
    Kernel(
        "bias_dropout_add.kernel:_bias_dropout_add_fwd_kernel",
        {"x": "bf16", "bias": "bf16", "residual": "bf16", "y": "bf16"} | DRAW,
        TILE | {"STRIPS": 7, "BLOCK_ROWS": 1, "DROP": True, "OCTETS": True},
        2,
        draws=True,
    ),
    Kernel(
        "bias_dropout_add.kernel:_bias_dropout_add_bwd_kernel",
        {"dy": "bf16", "dx": "bf16", "partial": "fp32", "positions": "i64"} | DRAW,
        TILE | {"STRIPS": 7, "OCTETS": True},
        draws=True,
    ),
    Kernel(  # Triton makes a constant of an argument that is 1
        "bias_dropout_add.kernel:_bias_dropout_add_bwd_kernel",
        {"dy": "bf16", "dx": "bf16", "partial": "fp32"} | DRAW,
        TILE | {"STRIPS": 7, "OCTETS": True, "batch": 1, "splits": 1, "threshold": 1},
        draws=True,
    ),
    Kernel(
        "bias_dropout_add.kernel:_bias_dropout_add_fwd_kernel",
        {"x": "bf16", "residual": "bf16", "y": "bf16"} | DRAW,
        TILE | {"STRIPS": 7, "BLOCK_ROWS": 1, "DROP": True, "OCTETS": False},
        2,
        wide=False,
        draws=True,
    ),
    Kernel(
        "bias_dropout_add.kernel:_bias_dropout_add_fwd_kernel",
        {"x": "bf16", "bias": "bf16", "residual": "bf16", "y": "bf16"},
        TILE | {"STRIPS": 7, "BLOCK_ROWS": 1, "DROP": False, "OCTETS": True},
    ),
    Kernel(
        "bias_dropout_add.kernel:_bias_gradient_kernel",
        {"dy": "bf16", "partial": "fp32"},
        {"STRIPS": 7, "BLOCK_ROWS": 4, "BLOCK_COLS": 512, "STAGES": 3},
        2,
    ),
    Kernel(
        "masked_softmax.kernel:_masked_softmax_fwd_kernel",
        {"x": "bf16", "y": "bf16", "lengths": "i64"},
        {"CAUSAL": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 2048},
    ),
    Kernel(
        "masked_softmax.kernel:_masked_softmax_bwd_kernel",
        {"dy": "bf16", "y": "bf16", "dx": "bf16"},
        {"CAUSAL": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 2048},
    ),
    Kernel(
        "rotary.kernel:_rotary_kernel",
        {"q": "bf16", "q_out": "bf16", "positions": "i64"} | TABLE,
        HEADS | {"INVERSE": False, "Q_BLOCKS": 5, "K_BLOCKS": 0},
        2,
    ),
    Kernel(
        "rotary.kernel:_rotary_kernel",
        {"q": "bf16", "q_out": "bf16", "k": "bf16", "k_out": "bf16"} | TABLE,
        HEADS | {"INVERSE": True, "Q_BLOCKS": 4, "K_BLOCKS": 1},
        2,
    ),
    Kernel(
        "rotary.kernel:_merge_grad_kernel",
        {"dq": "bf16", "dk": "bf16", "dv": "bf16", "dst": "bf16"} | TABLE,
        HEADS | {"INTERLEAVED": True, "BLOCK_DIM": 128, "Q_BLOCKS": 4, "K_BLOCKS": 1},
        2,
    ),
    Kernel(
        "qk_norm.kernel:_qk_norm_fwd_kernel",
        dict.fromkeys(("qkv", "q", "k", "q_weight", "k_weight", "q_bias", "k_bias"), "bf16"),
        QK,
        wide=False,
    ),
    Kernel("qk_norm.kernel:_qk_norm_bwd_kernel", QK_B, QK | {"HAS_BIAS": True}, wide=False),
    Kernel(
        "fp8.kernel:_cast_kernel",
        {"x": "bf16", "q": "fp8e4nv"} | FP8_STATE,
        {"MAX": 0.0, "ROWS": True},
        tile="cast",
    ),
    Kernel(
        "fp8.kernel:_norm_cast_kernel",
        {"x": "bf16", "weight": "bf16", "q": "fp8e4nv", "rstd": "fp32"} | FP8_STATE,
        {"LAYER": False, "ZERO_CENTERED": False, "MAX": 0.0} | FP8_ROW,
        8,
    ),
    Kernel(
        "fp8.turned:_cast_both_kernel",
        {"x": "bf16", "q": "fp8e4nv", "qt": "fp8e4nv"} | FP8_STATE,
        {"MAX": 0.0, "ROWS": True},
        tile="cast both",
    ),
    *(
        Kernel(
            "fp8.turned:_cast_both_kernel",
            {"x": "bf16", "q": "fp8e4nv", "qt": "fp8e4nv"} | FP8_STATE,
            {"MAX": 0.0, "ROWS": rows},
            tile="cast both",
            wide=False,
            odd=ODD_ROWS | (set() if rows else {"cols"}),
        )
        for rows in (True, False)
    ),
    *(
        Kernel(
            "fp8.turned:_cast_both_kernel",
            {"x": kind, "q": "fp8e5", "qt": "fp8e5"} | FP8_STATE,
            {"MAX": 0.0, "ROWS": True},
            tile="cast both",
            wide=not odd,
            odd=odd,
        )
        for kind, odd in (
            ("bf16", frozenset[str]()),
            ("bf16", ODD_ROWS),
            ("fp16", frozenset[str]()),
        )
    ),
    *(
        Kernel(
            "fp8.turned:_transpose_kernel",
            {"q": "u8", "qt": "u8"},
            {"MAX": 0.0, "WHOLE": tile == "transpose"},
            tile=tile,
            wide=not odd,
            odd=odd,
        )
        for tile, odd in (
            ("transpose", frozenset[str]()),
            ("ragged transpose", frozenset[str]()),
            ("ragged transpose", ODD_ROWS | {"cols"}),
        )
    ),
    *(
        Kernel(
            "fp8.turned:_backward_kernel",
            FP8_BACKWARD | pointers,
            FP8_GATE | form | {"ROWS": rows},
            tile=tile,
            wide=not odd,
            ahead=not odd,
            odd=odd,
        )
        for tile, pointers, form in FP8_BACKWARDS
        for rows, odd in (
            (True, frozenset[str]()),
            (True, ODD_ROWS),
            (False, ODD_ROWS | {"cols"}),
        )
    ),
    *(
        Kernel(
            "fp8.turned:_backward_kernel",
            FP8_BACKWARD | pointers,
            FP8_GATE | form | {"ROWS": True},
            tile=tile,
            ahead="x" not in pointers,
        )
        for tile, pointers, form in FP8_FORMS
    ),
    *(
        Kernel(
            "fp8.block_kernel:_block_cast_kernel",
            BLOCKS | {"x": "bf16"} | dict.fromkeys(("q", "qt"), dtype),
            {"MAX": 0.0, "TOP_EXPONENT": top, "BLOCK": block, "COLUMNS": True},
            tile="blocks",
        )
        for dtype, top in (("fp8e4nv", 8), ("fp8e5", 15))
        for block in (128, 32)
    ),
    Kernel(  # a view may begin anywhere; nobody asks how fast that is
        "fp8.block_kernel:_block_cast_kernel",
        BLOCKS | {"x": "bf16"},
        {"MAX": 0.0, "TOP_EXPONENT": 8, "BLOCK": 128, "COLUMNS": True},
        tile="blocks",
        wide=False,
        odd=ODD_ROWS,
    ),
    Kernel(
        "fp8.block_kernel:_block_cast_kernel",
        BLOCKS | {"x": "fp32"},
        {"MAX": 0.0, "TOP_EXPONENT": 8, "BLOCK": 128, "COLUMNS": True, **FP8_SQUARE, "GROUP": 1},
        8,
    ),
    Kernel(
        "fp8.block_kernel:_square_cast_kernel",
        BLOCKS | {"w": "bf16"},
        {"MAX": 0.0, "TOP_EXPONENT": 8, "SIZE": 128},
        tile="squares",
        odd=frozenset({"inverse_stride", "inverse_t_stride"}),
    ),
    Kernel(
        "fp8.kernel:_activation_cast_kernel",
        {"x": "bf16", "q": "fp8e4nv"} | FP8_STATE,
        FP8_GATE,
        tile="activation",
    ),
    Kernel(
        "fp8.kernel:_activation_cast_kernel",
        {"x": "bf16", "bias": "bf16", "q": "fp8e4nv"} | FP8_STATE,
        FP8_GATE | FP8_LIMITED,
        tile="activation",
    ),
    Kernel(
        "cross_entropy.kernel:_loss_kernel", LOSS | {"loss": "fp32", "lse": "fp32"}, LOSS_ROW, 8, wide=False
    ),
    Kernel("cross_entropy.kernel:_statistics_kernel", LOSS | {"out": "fp32"}, LOSS_ROW, 8, wide=False),
    Kernel(
        "cross_entropy.kernel:_gradient_kernel",
        LOSS | {"grad": "bf16", "lse": "fp32", "upstream": "fp32"},
        {"WEIGHTED": True, "BLOCK": 4096},
        8,
    ),
    Kernel(
        "linear_cross_entropy.kernel:_loss_and_gradient_kernel",
        LOSS | {"loss": "fp32", "lse": "fp32"},
        {
            "SMOOTHED": False,
            "WEIGHTED": True,
            "SCALED": False,
            "FIRST": "evict_last",
            "SECOND": "evict_first",
            "WRITE_GRADIENT": True,
            "LANES": 4096,
            "WIDTH": 8,
        },
        32,
        wide=False,  # one logit is read alone: that of the label
    ),
    Kernel(
        "triton_common:_column_sums_kernel",
        {"a": "fp32", "a_out": "fp32", "b": "fp32", "b_out": "bf16"},
        {"A_ACCUMULATE": True, "B_ACCUMULATE": True, "BLOCK_ROWS": 512, "BLOCK_COLS": 16},
        8,
        wide=False,
    ),
)
# Of one row Triton makes a constant, and over the zeros beside it ptxas has lost a register.
CASTS = {
    kernel.place: kernel
    for kernel in reversed(KERNELS)
    if re.match(r"fp8\..*(cast|both|backward)_", kernel.place)
}
KERNELS += tuple(
    replace(kernel, constants=kernel.constants | {"rows": 1}, wide=False, ahead=False)
    for place, kernel in CASTS.items()
    if "square" not in place
)
