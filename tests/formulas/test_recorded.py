"""FLOPs and bytes of recorded operators against torch's own counter and against the sizes by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from redline.formulas.recorded import gemm_sizes, moves_nothing, operator_bytes, operator_flops

BF16 = "c10::BFloat16"


@pytest.mark.parametrize(
    ("name", "call", "shapes"),
    [
        ("aten::mm", torch.mm, [(3, 5), (5, 7)]),
        ("aten::addmm", torch.addmm, [(7,), (3, 5), (5, 7)]),
        ("aten::bmm", torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        ("aten::baddbmm", torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        ("aten::linear", F.linear, [(2, 3, 5), (7, 5)]),
    ],
)
def test_products_against_torchs_counter(name, call, shapes) -> None:
    with FlopCounterMode(display=False) as counter:
        call(*(torch.ones(shape) for shape in shapes))
    assert operator_flops(name, [list(shape) for shape in shapes]) == counter.get_total_flops()


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_counts_both_products_and_half_of_them_under_a_causal_mask(heads_first) -> None:
    B, S, N, G, D = 2, 64, 8, 2, 16
    q, k = ([B, N, S, D], [B, G, S, D]) if heads_first else ([B, S, N, D], [B, S, G, D])
    forward = 2 * 2 * B * N * S * S * D
    name = "aten::_scaled_dot_product_flash_attention"
    assert operator_flops(name, [q, k, k], causal=False) == forward
    assert operator_flops(name, [q, k, k]) == forward / 2
    assert operator_flops(f"{name}_backward", [q, q, k, k, q]) == forward  # twice the forward's, halved
    assert operator_flops(name, [q]) is None


def test_what_is_no_product_has_no_flops() -> None:
    assert operator_flops("aten::mul", [[3, 5], [3, 5]]) is None
    assert operator_flops("aten::mm", []) is None
    assert gemm_sizes("aten::mm", [[], []]) is None


def test_bytes() -> None:
    assert operator_bytes("aten::mm", [[3, 5], [5, 7]], [BF16, BF16]) == 2 * (15 + 35 + 21)
    assert operator_bytes("aten::mul", [[3, 5], []], ["float", "Scalar"]) == 4 * (15 + 15)
    assert operator_bytes("aten::copy_", [[3, 5], [3, 5]], ["float", BF16]) == 15 * (4 + 2)
    assert operator_bytes("aten::fill_", [[3, 5], []], ["float", "Scalar"]) == 15 * 4
    y, dy = [3, 10], [3, 5]  # gate and up; F = 5
    assert operator_bytes("BiasSwiGLUFn", [y], [BF16]) == 2 * (30 + 15)
    assert operator_bytes("BiasSwiGLUFnBackward", [dy], [BF16]) == 2 * (15 + 30 + 30)
    table, index = [100, 8], [2, 3]
    assert operator_bytes("aten::embedding", [table, index], [BF16, "long int"]) == 6 * (8 + 2 * 2 * 8)
    assert operator_bytes("EmbeddingFn", [index, table], ["long int", BF16]) == 6 * (8 + 2 * 2 * 8)
    assert operator_bytes("EmbeddingFnBackward", [[6, 8]], [BF16]) == 2 * 2 * 48
    assert operator_bytes("aten::view", [[3, 5]], ["float"]) is None
    assert operator_bytes("aten::add_", [[3, 5], [3, 5]], ["float", BF16]) == 15 * (4 + 2 + 4)
    assert operator_bytes("aten::masked_fill_", [[3, 5], [3, 1]], [BF16, "bool"]) == 15 * 2 * 2 + 3
    with_main_grad = operator_bytes("EmbeddingFn", [index, table, table], ["long int", BF16, "float"])
    assert with_main_grad == 6 * (8 + 2 * 2 * 8)
    assert operator_bytes("RMSNormFnBackward", [[4, 5]], [BF16]) == 3 * 2 * 20
    assert operator_bytes("GatedActivationFn", [[4, 10], [10]], [BF16, BF16]) == 2 * (40 + 10 + 20)
    assert operator_bytes("GatedActivationFnBackward", [[4, 5]], [BF16]) == 5 * 2 * 20
    assert operator_bytes("aten::stack", [[[3, 5], [3, 5]]], ["TensorList"]) is None
    assert moves_nothing("aten::transpose") and not moves_nothing("aten::clone")
