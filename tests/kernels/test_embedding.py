"""Embedding lookup and its sorted gradient, against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse
from wide import COLUMNS, some

from redline.errors import ConfigError, ShapeError
from redline.kernels.common import use_triton
from redline.kernels.embedding import Positions, bench, embedding, supports

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(shape, vocab, rows, hidden, dtype, device, seed=0):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, shape, generator=gen)
    weight = torch.randn(rows, hidden, generator=gen).to(dtype)
    dout = torch.randn(*shape, hidden, generator=gen).to(dtype)
    return tokens.to(device), weight.to(device), dout.to(device)


def exact_gradient(tokens, dout, rows):
    grad = torch.zeros(rows, dout.shape[-1], dtype=torch.float64, device=dout.device)
    return grad.index_add_(0, tokens.reshape(-1), dout.double().reshape(-1, dout.shape[-1]))


def check(device, shape, vocab, padding, hidden, dtype, fused_grad):
    """Lookup exact; main_grad is added to, rows of the padding untouched."""
    rows = vocab + padding
    tokens, weight, dout = draw(shape, vocab, rows, hidden, dtype, device)
    assert use_triton("embedding", "auto", supports(weight))
    results = []
    for impl in ("triton", "reference"):
        leaf = weight.clone().requires_grad_()
        main_grad = torch.full((rows, hidden), 0.25, device=device) if fused_grad else None
        out = embedding(tokens, leaf, main_grad=main_grad, vocab_size=vocab, impl=impl)
        assert torch.equal(out, F.embedding(tokens, weight))
        out.backward(dout)
        assert (leaf.grad is None) == fused_grad
        results.append(main_grad if fused_grad else leaf.grad)
    start = 0.25 if fused_grad else 0.0
    true = exact_gradient(tokens, dout, rows) + start
    assert_no_worse(*results, true, "gradient")
    assert (results[0][vocab:] == start).all()


@some
@given(
    count=st.integers(1, 3), hidden=COLUMNS, dtype=st.sampled_from(DTYPES), fused_grad=st.booleans(),
)  # fmt: skip
def test_any_width(device, count, hidden, dtype, fused_grad):
    """Each row is several programs' work."""
    check(device, (count,), 2, 1, hidden, dtype, fused_grad)


@pytest.mark.parametrize("hidden", (16384, 8191))
def test_wide_hidden(device, hidden):
    check(device, (3,), 2, 1, hidden, torch.bfloat16, True)


@pytest.mark.parametrize("count", [8, 7])
@pytest.mark.parametrize("hidden", [64, 70])
def test_whole_tiles_and_parts_of_one_look_up_alike(device, count, hidden):
    """Another rank's ids are zeros, those of no rank NaN; a load without a mask shows nothing of row 0."""
    ids = torch.tensor([4, -1, 2, 8, 9, 3, 1 << 40, 5], device=device)[:count]
    weight = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1)).to(device)
    out = embedding(ids, weight, vocab_start=2, vocab_size=9, impl="triton")
    place, nobody = (ids - 2).clamp(0, 2), (ids < 0) | (ids >= 9)
    want = torch.where(((ids >= 2) & (ids < 5))[:, None], weight[place], weight.new_zeros(()))
    want = torch.where(nobody[:, None], weight.new_tensor(torch.nan), want)
    assert torch.equal(out.nan_to_num(-7.0), want.nan_to_num(-7.0)) and out.isnan().any()
    nothing = embedding(ids, weight[:0], vocab_start=9, vocab_size=9, impl="triton")
    assert torch.equal(nothing.isnan().all(1), nobody) and (nothing[~nobody] == 0).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(((0,), (1,), (7, 3), (40,))),
    vocab=st.sampled_from((1, 2, 5, 1009)),
    padding=st.sampled_from((0, 3)),
    hidden=st.sampled_from((1, 7, 64, 129)),
    dtype=st.sampled_from(DTYPES),
    fused_grad=st.booleans(),
)
def test_lookup_is_exact_and_gradient_matches_float64(
    device, shape, vocab, padding, hidden, dtype, fused_grad
):
    """Runs of equal ids up to 40 long."""
    check(device, shape, vocab, padding, hidden, dtype, fused_grad)


def test_main_grad_is_summed_in_fp32(device):
    """300 bf16 gradients into one row: a bf16 sum would stop growing at 256."""
    tokens = torch.full((300,), 3, device=device)
    weight = torch.zeros(4, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    main_grad = torch.zeros(4, 2, device=device)
    embedding(tokens, weight, main_grad=main_grad).sum().backward()
    assert main_grad[3].tolist() == [300.0, 300.0]
    assert (main_grad[:3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused_grad", (False, True))
def test_positions_are_added_before_the_one_rounding(device, dtype, fused_grad):
    tokens, weight, dout = draw((9, 2), 20, 20, 33, dtype, device)
    table = torch.randn(9, 33, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    places = torch.arange(9, device=device)[:, None].expand(9, 2)
    true = (F.embedding(tokens, weight.double()) + F.embedding(places, table.double())).to(dtype)
    for impl in ("triton", "reference"):
        words, learned = weight.clone().requires_grad_(), table.clone().requires_grad_()
        grads = [torch.zeros(x.shape, device=device) if fused_grad else None for x in (words, learned)]
        out = embedding(
            tokens, words, main_grad=grads[0], positions=Positions(places, learned, grads[1]), impl=impl
        )
        out.backward(dout)
        torch.testing.assert_close(out, true, rtol=torch.finfo(dtype).eps, atol=0)
        for leaf, main_grad, ids in ((words, grads[0], tokens), (learned, grads[1], places)):
            grad = main_grad if fused_grad else leaf.grad
            expected = exact_gradient(ids, dout, len(leaf))
            # at most a few rows are summed: one rounding each, of the dtype that holds the sum
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(grad.double(), expected, rtol=4 * eps, atol=8 * eps)


def test_tables_of_two_dtypes_are_added_in_fp32(device):
    """Kernel and twin round the sum once, to the dtype of the words."""
    gen = torch.Generator().manual_seed(3)
    words = (6e4 * torch.rand(9, 40, generator=gen)).half().to(device)
    places = (1e3 * torch.randn(5, 40, generator=gen)).bfloat16().to(device)
    tokens, ids = torch.arange(5, device=device), torch.arange(5, device=device)
    true = (words[tokens].double() + places[ids].double()).half()
    for impl in ("triton", "reference"):
        assert torch.equal(embedding(tokens, words, positions=Positions(ids, places), impl=impl), true)


def test_shares_of_the_vocabulary_add_up(device):
    """Each rank looks up its rows and gives zeros elsewhere; gradients land in its own rows only."""
    tokens, weight, dout = draw((30,), 50, 56, 8, torch.float32, device)
    total, grads = torch.zeros(30, 8, device=device), []
    for start in (0, 14, 28, 42):
        share = weight[start : start + 14].clone().requires_grad_()
        main_grad = torch.zeros(14, 8, device=device)
        out = embedding(tokens, share, main_grad=main_grad, vocab_start=start, vocab_size=50)
        out.backward(dout)
        total += out.detach()
        grads.append(main_grad)
    assert torch.equal(total, F.embedding(tokens, weight))
    torch.testing.assert_close(
        torch.cat(grads).double(), exact_gradient(tokens, dout, 56), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_an_unknown_token_is_loud(device, impl):
    """Also one that points at a padded row; its neighbours are right, and backward writes nowhere else."""
    tokens, weight, dout = draw((4,), 10, 12, 8, torch.float32, device)
    tokens[1], tokens[2] = 11, -1
    main_grad = torch.zeros_like(weight)
    out = embedding(tokens, weight.requires_grad_(), main_grad=main_grad, vocab_size=10, impl=impl)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    assert torch.equal(out[[0, 3]].detach(), weight[tokens[[0, 3]]].detach())
    if impl == "triton":
        out.backward(dout)
        known = tokens[[0, 3]]
        assert torch.equal(main_grad, exact_gradient(known, dout[[0, 3]], 12).float())


def test_strided_inputs(device):
    """B015's kind: transposed tokens, a slice of a wider weight, a gradient expanded or transposed."""
    tokens, weight, _ = draw((5, 6), 20, 20, 16, torch.float32, device)
    view, narrow = tokens.t(), weight[:, ::2].detach().requires_grad_()
    out = embedding(view, narrow)
    assert torch.equal(out.detach(), F.embedding(view, narrow.detach()))
    dout = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(6)).to(device).permute(2, 1, 0)
    out.backward(dout)
    torch.testing.assert_close(narrow.grad.double(), exact_gradient(view, dout, 20), rtol=1e-5, atol=1e-6)
    narrow.grad = None
    embedding(view, narrow).sum().backward()
    counts = torch.bincount(tokens.reshape(-1), minlength=20).float()
    assert torch.equal(narrow.grad, counts[:, None].expand(20, 8))


def test_frozen_weight_writes_nothing(device):
    tokens, weight, dout = draw((6,), 9, 9, 4, torch.float32, device)
    table, main_grad = torch.randn(6, 4, device=device, requires_grad=True), torch.zeros_like(weight)
    places = torch.arange(6, device=device)
    embedding(tokens, weight, main_grad=main_grad, positions=Positions(places, table)).backward(dout)
    assert (main_grad == 0).all()
    assert torch.equal(table.grad, dout)


def embedding_kernel():
    from redline.kernels.embedding import kernel  # imports Triton

    return kernel


def sorted_by(kernel, ids, vocab_size):
    """Ids in order and the places they had, out of the entries."""
    entries = kernel._sorted(ids, vocab_size)
    assert entries.dtype == torch.int64
    return (entries >> 32).cpu(), (entries & 0xFFFFFFFF).cpu()


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from((1, 2, 15, 16, 17, 255, 256, 257, 600)),
    vocab=st.sampled_from((1, 3, 700)),
    tile=st.sampled_from((32, 64, 1024)),
    dtype=st.sampled_from((torch.int64, torch.int32)),
)
def test_tokens_are_sorted_stably(device, tokens, vocab, tile, dtype):
    """In tiles by counting, then merged, as PyTorch's stable sort; ids of no vocabulary go to the end."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, vocab, (tokens,), generator=generator, dtype=dtype)
    ids[torch.rand(tokens, generator=generator) < 0.1] = -100
    kernel, last = embedding_kernel(), 2**31 // tile - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "RANK_TILE", tile)
        found = sorted_by(kernel, ids.to(device), vocab)
    wanted = torch.where(ids < 0, last, ids.long()).sort(stable=True)
    assert torch.equal(found[0], wanted.values) and torch.equal(found[1], wanted.indices)


@pytest.mark.parametrize("tokens", (5, 2**31), ids=("by merging", "by radix"))
def test_ids_of_no_vocabulary_are_never_taken_for_one(device, tokens, monkeypatch):
    """2^32 + 5 has the lower half of 5; the id before a vocabulary's first and the one after its last."""
    kernel = embedding_kernel()
    monkeypatch.setattr(kernel, "RANK_TOKENS", kernel.RANK_TOKENS if tokens == 5 else 0)
    ids = torch.tensor([2**32 + 5, 5, 2**31 - 1, -1, 5, 8, -(2**40)], device=device)
    found, places = sorted_by(kernel, ids, 8)
    assert sorted(places.tolist()) == list(range(7))
    known = (found >= 0) & (found < 8)
    assert found[known].tolist() == [5, 5] and places[known].tolist() == [1, 4]
    assert torch.equal(found, found.sort().values)


def test_a_vocabulary_too_large_for_a_key_is_sorted_by_pytorch(device):
    kernel = embedding_kernel()
    ids = torch.tensor([2**31 - 2, 3, 2**29, 3], device=device)
    found, places = sorted_by(kernel, ids, 2**31 - 1)
    assert found.tolist() == [3, 3, 2**29, 2**31 - 2] and places.tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(
    "choices",
    (
        {"GATHER_ROWS": 4, "GATHER_WARPS": 8},
        {"RUN_ROWS": 1, "RUN_BLOCK": 128, "RUN_COLUMNS": 4},
        {"RUN_ROWS": 2, "RUN_BLOCK": 64, "RUN_COLUMNS": 16, "RANK_TILE": 32, "MERGE_TILES": 2},
    ),
    ids=("gather", "run", "tiles"),
)
def test_launch_choices_change_no_bit(device, choices, monkeypatch):
    """Of the forward; of the backward where sums are exact. So one run on a GPU may choose among them."""
    tokens, weight, _ = draw((9, 5), 6, 7, 130, torch.bfloat16, device)
    dout = torch.randint(-4, 5, (9, 5, 130), generator=torch.Generator().manual_seed(1)).to(
        device, torch.bfloat16
    )
    results = []
    for values in ({}, choices):
        for name, value in values.items():
            monkeypatch.setattr(embedding_kernel(), name, value)
        main_grad = torch.zeros(7, 130, device=device)
        out = embedding(tokens, weight.clone().requires_grad_(), main_grad=main_grad)
        out.backward(dout)
        results.append((out.detach(), main_grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_same_bits_every_run(device):
    tokens, weight, dout = draw((60,), 3, 3, 40, torch.bfloat16, device)
    grads = [torch.zeros(3, 40, device=device) for _ in range(2)]
    for grad in grads:
        embedding(tokens, weight.clone().requires_grad_(), main_grad=grad).backward(dout)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "places",
    [
        torch.arange(20).view(5, 4)[:, 1:2].expand(5, 3),
        torch.arange(40, dtype=torch.int32).view(5, 8)[:, ::3],
        torch.arange(15).view(3, 5).t(),
        torch.tensor(7).expand(5, 3),
        torch.arange(60).view(5, 3, 4)[..., 0],
    ],
    ids=("a column for all", "every third", "transposed", "one for all", "every fourth"),
)
@pytest.mark.parametrize("fused_grad", (False, True))
def test_positions_of_any_strides_b015(device, places, fused_grad):
    """B015: forward and backward; a view that is one by one in memory nowhere counts as what it shows."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 9, (5, 3), generator=generator).to(device)
    words, table, dout = (torch.randn(shape, generator=generator) for shape in ((9, 8), (60, 8), (5, 3, 8)))
    results = []
    for impl in ("triton", "reference"):
        weight, learned = (each.to(device).requires_grad_() for each in (words.clone(), table.clone()))
        grads = (
            [torch.zeros(9, 8, device=device), torch.zeros(60, 8, device=device)]
            if fused_grad
            else [None] * 2
        )
        positions = Positions(places.to(device), learned, grads[1])
        out = embedding(tokens, weight, main_grad=grads[0], positions=positions, impl=impl)
        out.backward(dout.to(device))
        results.append([out.detach(), *(grads if fused_grad else (weight.grad, learned.grad))])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


def test_what_is_wrong_is_loud(device):
    tokens, weight, _ = draw((6,), 9, 9, 4, torch.float32, device)
    with pytest.raises(ShapeError, match="main_grad"):
        embedding(tokens, weight, main_grad=torch.zeros(8, 4, device=device))
    with pytest.raises(ShapeError, match="after the sum"):
        embedding(tokens, weight, vocab_size=18, positions=Positions(tokens, weight))
    with pytest.raises(ShapeError, match="position id"):
        embedding(tokens, weight, positions=Positions(tokens[:2], weight))
    for wrong in (tokens.float(), tokens > 3):
        with pytest.raises(ShapeError, match="ids that are integers"):
            embedding(wrong, weight)
        with pytest.raises(ShapeError, match="positions that are integers"):
            embedding(tokens, weight, positions=Positions(wrong, weight))
    with pytest.raises(ConfigError, match="float64"):
        embedding(tokens, weight.double(), impl="triton")
    assert embedding(tokens, weight.double()).dtype == torch.float64


@pytest.mark.parametrize("fused_grad", (False, True))
def test_compiles_without_a_graph_break(device, fused_grad):
    tokens, weight, dout = draw((10,), 9, 9, 4, torch.float32, device)
    results = []

    def run(tokens, weight, main_grad):
        return embedding(tokens, weight, main_grad=main_grad) * 2

    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        main_grad = torch.zeros_like(weight) if fused_grad else None
        fn(tokens, leaf, main_grad).backward(dout)
        results.append(main_grad if fused_grad else leaf.grad)
    assert torch.equal(*results)


def test_bench_cases_time_equal_things(device):
    for case in (bench._words(6, 20, 8), bench._with_positions(2, 3, 20, 8)):
        inputs = case.make_inputs(torch.device(device), torch.float32)
        fused, eager = (case.providers[name]()(*inputs) for name in ("fused", "eager"))
        assert torch.equal(fused, eager)
