"""Projection and loss in chunks, against float64 with the whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse
from shards import ALONE, CUTS, in_turn, starts_of
from torch.utils._python_dispatch import TorchDispatchMode
from wide import TOKENS, VOCABULARIES, some

from redline.errors import ConfigError, RedlineError, ShapeError
from redline.formulas.loss_chunks import LOGITS_BYTES, loss_chunk_tokens
from redline.kernels.common import use_triton
from redline.kernels.cross_entropy import VocabShard, cross_entropy
from redline.kernels.linear_cross_entropy import LossSpec, bench, linear_cross_entropy, supports

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy


def draw(tokens, hidden, rows, vocab, dtype, device, seed=0, ignored=0.2):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype)
    weight = (torch.randn(rows, hidden, generator=gen) * (2 / max(hidden, 1) ** 0.5)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=gen)
    labels[torch.rand(tokens, generator=gen) < ignored] = -100
    weights = torch.rand(tokens, generator=gen) + 0.5
    return x.to(device), weight.to(device), labels.to(device), weights.to(device)


def exact(x, weight, labels, spec, weights=None, upstream=1.0):
    """(loss, gradient of x, gradient of the weight) in float64 by PyTorch's own cross-entropy."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = x @ weight[: spec.vocab_size].t()
    smoothing = spec.label_smoothing * spec.vocab_size / max(spec.vocab_size - 1, 1)
    loss = F.cross_entropy(logits, labels, ignore_index=-100, label_smoothing=smoothing, reduction="none")
    loss = loss + spec.z_loss * torch.where(labels >= 0, logits.logsumexp(1) ** 2, 0.0)
    total = (loss if weights is None else loss * weights.double()).sum()
    (total * upstream).backward()
    return total.detach(), x.grad, weight.grad


def ours(x, weight, labels, spec, weights=None, upstream=1.0, **kwargs):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    total = linear_cross_entropy(x, weight, labels, spec, weights, **kwargs)
    (total * upstream).backward()
    main_grad = kwargs.get("main_grad")
    assert (weight.grad is None) == (main_grad is not None)
    return total.detach(), x.grad, weight.grad if main_grad is None else main_grad


FORM = {
    "padding": st.sampled_from((0, 1, 25)),
    "chunk": st.sampled_from((1, 4, None)),
    "dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    "loss": st.sampled_from(((0.0, 0.0), (0.1, 1e-3))),
    "weighted": st.booleans(),
    "fused_wgrad": st.booleans(),
}


def check(device, tokens, hidden, vocab, padding, chunk, dtype, loss, weighted, fused_wgrad, ignored=0.2):
    """No worse than the unfused path by more than a tenth, in any number of chunks."""
    x, weight, labels, weights = draw(tokens, hidden, vocab + padding, vocab, dtype, device, ignored=ignored)
    weights = weights if weighted else None
    spec = LossSpec(vocab_size=vocab, label_smoothing=loss[0], z_loss=loss[1])
    assert use_triton("linear_cross_entropy", "auto", supports(x, weight))

    def main_grad():
        return torch.zeros(weight.shape, device=device) if fused_wgrad else None

    got = ours(x, weight, labels, spec, weights, chunk_tokens=chunk, main_grad=main_grad())
    plain = ours(x, weight, labels, spec, weights, impl="reference", main_grad=main_grad())
    true = exact(x, weight, labels, spec, weights)
    assert_no_worse(got[0], plain[0], true[0], "loss")
    assert_no_worse(got[1], plain[1], true[1], "dhidden")
    # both sum logit gradients rounded to the compute dtype: its steps measure an fp32 main_grad too
    assert_no_worse(got[2].to(dtype), plain[2].to(dtype), true[2], "dweight")
    assert (got[2][vocab:] == 0).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from((0, 1, 5, 13)), hidden=st.sampled_from((1, 7, 32)),
    vocab=st.sampled_from((2, 3, 65, 127, 1001)), **FORM,
)  # fmt: skip
def test_loss_and_gradients_match_float64(device, **form):
    check(device, **form)


@some
@given(
    tokens=TOKENS, hidden=st.integers(33, 128), vocab=VOCABULARIES,
    **FORM | {"dtype": st.sampled_from((torch.bfloat16, torch.float16))},
)  # fmt: skip
def test_any_vocabulary(device, **form):
    """In 16 bits: in fp32 the order in which the GEMMs sum so many products would be what is compared."""
    check(device, ignored=0.0, **form)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("loss", ((0.0, 0.0), (0.1, 1e-3)))
def test_a_row_of_many_tiles(device, monkeypatch, dtype, loss):
    """Real vocabularies take several in both walks; here the tiles are smaller: at least five and nine."""
    from redline.kernels.linear_cross_entropy import kernel  # imports Triton

    monkeypatch.setattr(kernel, "MAX_WARPS", 1)
    vocab, hidden = 4999, 8
    tiles = kernel.row_tiles(vocab, dtype, kernel.MAX_WARPS)
    assert vocab / (tiles.lanes * tiles.width) > 4
    x, weight, labels, weights = draw(4, hidden, vocab + 3, vocab, dtype, device)
    spec = LossSpec(vocab_size=vocab, label_smoothing=loss[0], z_loss=loss[1])
    got, plain = (ours(x, weight, labels, spec, weights, impl=impl) for impl in ("triton", "reference"))
    true = exact(x, weight, labels, spec, weights)
    for found, other, wanted in zip(got, plain, true, strict=True):
        assert_no_worse(found, other, wanted)


def test_a_vocabulary_above_250k(device):
    """B005: one logit 30 above the rest; log-sum-exp within 1e-3, and a gradient that sums to 0.

    The head's first column are the logits, and that of its gradient is the logits' gradient.
    """
    vocab = 262_147
    weight = torch.randn(vocab, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[200_003, 0] = 30.0
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    weight, x, main_grad = weight.to(device), x.to(device), torch.zeros(vocab, 8, device=device)
    label, spec = torch.tensor([5], device=device), LossSpec(vocab_size=vocab)
    loss, dx, _ = ours(x, weight, label, spec, main_grad=main_grad)
    logits = weight[:, 0].double()
    assert abs(loss.double() + logits[5] - logits.logsumexp(0)) < 1e-3
    true = logits.softmax(0)
    true[5] -= 1.0
    grad = main_grad[:, 0].double()
    assert abs(grad.sum()) < 1e-3
    assert (grad - true).abs().max() <= 2**-8 and not main_grad[:, 1:].any()  # rounded to bf16
    torch.testing.assert_close(dx.double()[0], true @ weight.double(), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_the_z_part_is_told_apart(device, impl):
    """Over chunks, with a gradient and without: what the loss has above the loss without."""
    x, weight, labels, weights = draw(9, 16, 40, 37, torch.float32, device)
    spec, total = LossSpec(vocab_size=37, z_loss=0.03), torch.tensor(1.5, device=device)
    with_z = exact(x, weight, labels, spec, weights)[0]
    part = with_z - exact(x, weight, labels, LossSpec(vocab_size=37), weights)[0]
    ours(x, weight, labels, spec, weights, chunk_tokens=4, z_total=total, impl=impl)
    torch.testing.assert_close(total.double() - 1.5, part, rtol=1e-5, atol=0)
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, spec, weights, z_total=total, impl=impl)
    torch.testing.assert_close(total.double() - 1.5, 2 * part, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale_dtype", (torch.float32, torch.float64))
def test_main_grad_is_added_to_and_scaled_by_the_upstream_gradient(device, scale_dtype):
    """Two microbatches in flight, a loss scale as a device scalar, padded rows of main_grad untouched."""
    x, weight, labels, weights = draw(10, 16, 70, 61, torch.bfloat16, device)
    spec, scale = LossSpec(vocab_size=61), torch.tensor(256 / 3, dtype=scale_dtype, device=device)
    main_grad = torch.full((70, 16), 0.5, device=device)
    a, b = x[:5].clone().requires_grad_(), x[5:].clone().requires_grad_()
    losses = [
        linear_cross_entropy(
            part, weight.requires_grad_(), labels[rows], spec, weights[rows], main_grad=main_grad,
            grad_scale=scale,
        )
        for part, rows in ((a, slice(0, 5)), (b, slice(5, 10)))
    ]  # fmt: skip
    for loss in losses:
        (loss * scale).backward()
    true_loss, dx, dweight = exact(x, weight, labels, spec, weights, 256 / 3)
    assert sum(loss.item() for loss in losses) == pytest.approx(true_loss.item(), rel=1e-2)
    assert weight.grad is None
    # bf16 logits of size 8 carry errors of 2^-6: of the probabilities 1.6%, of the sum of ten tokens less
    assert (torch.cat((a.grad, b.grad)).double() - dx).norm() < 0.02 * dx.norm()
    assert (main_grad.double() - 0.5 - dweight).norm() < 0.02 * dweight.norm()
    assert (main_grad[61:] == 0.5).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device assertion would end the process")
@pytest.mark.parametrize(("scale", "factor"), [(None, 2.0), (None, float("nan")), (8.0, 1.0)])
def test_another_upstream_gradient_is_refused(device, scale, factor):
    x, weight, labels, _ = draw(4, 8, 20, 20, torch.float32, device)
    loss = linear_cross_entropy(
        x.requires_grad_(), weight.requires_grad_(), labels, LossSpec(vocab_size=20),
        main_grad=torch.zeros_like(weight), grad_scale=None if scale is None else torch.tensor(scale),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="grad_scale"):
        (loss * factor).backward()


@pytest.mark.parametrize("scaled", (False, True))
def test_any_upstream_gradient_without_main_grad(device, scaled):
    x, weight, labels, weights = draw(6, 8, 20, 20, torch.float32, device)
    spec = LossSpec(vocab_size=20)
    scale = torch.tensor(8.0, device=device) if scaled else None
    got = ours(x, weight, labels, spec, weights, upstream=3.0, grad_scale=scale)
    true = exact(x, weight, labels, spec, weights, upstream=3.0)
    for value, expected in zip(got, true, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused_wgrad", (False, True))
def test_a_scale_of_zero_gives_gradients_of_zero(device, fused_wgrad):
    """As a microbatch without a token to count has it. A gradient that cannot be found again is no number."""
    x, weight, labels, weights = draw(6, 8, 20, 20, torch.float32, device)
    zero, main_grad = torch.zeros((), device=device), torch.zeros(20, 8, device=device)
    how = {"grad_scale": zero, "main_grad": main_grad if fused_wgrad else None}
    _, dx, dweight = ours(x, weight, labels, LossSpec(vocab_size=20), weights, upstream=zero, **how)
    assert (dx == 0).all() and (dweight == 0).all()
    if not fused_wgrad:
        for upstream in (1.0, float("nan")):
            found = ours(x, weight, labels, LossSpec(vocab_size=20), upstream=upstream, grad_scale=zero)
            assert found[1].isnan().all() and found[2].isnan().all()


def test_second_backward_is_refused(device):
    x, weight, labels, _ = draw(3, 4, 9, 9, torch.float32, device)
    loss = linear_cross_entropy(x.requires_grad_(), weight, labels, LossSpec(vocab_size=9))
    loss.backward(retain_graph=True)
    with pytest.raises(RedlineError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("tokens", "chunk"), [(0, None), (5, None), (5, 2)])
@pytest.mark.parametrize("sharded", (False, True))
def test_a_gradient_of_its_own_is_written_whole(device, monkeypatch, tokens, chunk, dtype, sharded):
    """Whatever the memory held that it is made in: also in rows that have no logits, and without tokens."""
    x, weight, labels, _ = draw(tokens, 8, 80, 80 if sharded else 9, dtype, device)
    spec = LossSpec(vocab_size=80 if sharded else 9)
    shard = VocabShard(0, 80, lambda tensor, how: tensor) if sharded else None
    uninitialised = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: uninitialised(*a, **k).fill_(float("nan")))
    got = ours(x, weight, labels, spec, chunk_tokens=chunk, shard=shard)[2]
    main_grad = torch.zeros(80, 8, device=device)
    ours(x, weight, labels, spec, chunk_tokens=chunk, shard=shard, main_grad=main_grad)
    # one chunk of bf16 is rounded where it is written, others are summed in fp32 first
    torch.testing.assert_close(got.float(), main_grad.to(dtype).float(), rtol=2**-7, atol=1e-6)


def test_an_eager_call_asks_little_of_the_host(device):
    """Without a row: two tensors and the sum of the losses; backward compares, and asserts, on the device."""
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    x, weight, labels, _ = draw(0, 8, 9, 9, torch.bfloat16, device)
    main_grad, upstream = torch.zeros(9, 8, device=device), torch.ones((), device=device)
    x.requires_grad_(), weight.requires_grad_()
    with Asked():
        loss = linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=9), main_grad=main_grad)
        forward = len(asked)
        torch.autograd.grad(loss, x, upstream)
    assert asked[:forward] == ["new_empty", "empty_like", "sum"]
    assert asked[forward:] == ["eq", "_assert_async"]


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_evaluation_writes_no_gradient(device, mode):
    """B003's kind: the loss alone, main_grad untouched, also for a tiny vocabulary."""
    x, weight, labels, weights = draw(4, 5, 3, 3, torch.float32, device)
    x.requires_grad_(), weight.requires_grad_()
    main_grad = torch.zeros_like(weight)
    with mode():
        loss = linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=3), weights, main_grad=main_grad)
    assert loss.item() == pytest.approx(
        exact(x, weight, labels, LossSpec(vocab_size=3), weights)[0].item(), rel=1e-5
    )
    assert (main_grad == 0).all()


@pytest.mark.parametrize("frozen", ("hidden", "weight"))
def test_only_the_gradient_that_is_asked_for(device, frozen):
    x, weight, labels, _ = draw(6, 8, 20, 20, torch.float32, device)
    main_grad = torch.zeros_like(weight)
    x.requires_grad_(frozen != "hidden"), weight.requires_grad_(frozen != "weight")
    spec = LossSpec(vocab_size=20)
    linear_cross_entropy(x, weight, labels, spec, main_grad=main_grad, chunk_tokens=4).backward()
    _, dx, dweight = exact(x, weight, labels, spec)
    expected = torch.zeros_like(dweight) if frozen == "weight" else dweight
    torch.testing.assert_close(main_grad.double(), expected, rtol=1e-5, atol=1e-6)
    if frozen == "weight":
        torch.testing.assert_close(x.grad.double(), dx, rtol=1e-5, atol=1e-6)


def test_tokens_without_part_bring_no_nan(device):
    """A NaN hidden state of an ignored token reaches neither loss nor another token's gradient of x."""
    x, weight, labels, weights = draw(6, 8, 20, 20, torch.float32, device, ignored=0.0)
    x[1], labels[1], weights[2] = float("inf"), -1, 0.0
    total, dx, _ = ours(x, weight, labels, LossSpec(vocab_size=20), weights)
    assert torch.isfinite(total) and torch.isfinite(dx).all()
    assert (dx[1:3] == 0).all()


def test_strided_hidden_states(device):
    x, weight, labels, _ = draw(6, 16, 20, 20, torch.float32, device)
    spec, view = LossSpec(vocab_size=20), x[:, ::2].detach().requires_grad_()
    narrow = weight[:, :8].detach()
    linear_cross_entropy(view, narrow, labels, spec).backward()
    _, dx, _ = exact(view, narrow, labels, spec)
    torch.testing.assert_close(view.grad.double(), dx, rtol=1e-5, atol=1e-6)


def test_chunks_fill_the_budget_and_are_even():
    """At 128,256 bf16 logits: 4,096 tokens, 0.98 GiB; workspace stays below 1.5 GiB at every size."""
    assert loss_chunk_tokens(8192, 128_256, 2) == 4096
    for tokens in (0, 1, 127, 4096, 4097, 10_000, 65_536):
        for columns in (2, 50_257, 128_256, 256_000):
            chunk = loss_chunk_tokens(tokens, columns, 2)
            row_bytes = -(-columns // 64) * 128
            assert chunk % 128 == 0
            assert chunk * row_bytes <= LOGITS_BYTES
            assert -(-tokens // chunk) == -(-tokens // (LOGITS_BYTES // row_bytes // 128 * 128))


def test_what_is_wrong_is_loud(device):
    x, weight, labels, _ = draw(3, 4, 9, 9, torch.float32, device)
    with pytest.raises(ShapeError, match=r"(?s)fewer rows.*9 rows for 10"):
        linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=10))
    for wrong in (labels.float(), labels > 3, labels[:2]):
        with pytest.raises(ShapeError, match="one label a token, an integer"):
            linear_cross_entropy(x, weight, wrong, LossSpec(vocab_size=9))
    with pytest.raises(ShapeError, match="one weight a token"):
        linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=9), x[:2, 0])
    with pytest.raises(ShapeError, match="chunk_tokens=0"):
        linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=9), chunk_tokens=0)
    with pytest.raises(ShapeError, match="main_grad"):
        linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=9), main_grad=torch.zeros(8, 4))
    with pytest.raises(ConfigError, match="bfloat16"):
        linear_cross_entropy(x.bfloat16(), weight, labels, LossSpec(vocab_size=9), impl="triton")
    labels[0] = 9
    for impl in ("triton", "reference"):
        assert linear_cross_entropy(x, weight, labels, LossSpec(vocab_size=9), impl=impl).isnan()


def test_a_whole_weight_beside_a_shard_is_refused(device):
    """B009: never the plain loss + ln 2; nor less of the weight than the shard has."""
    x, weight, labels, _ = draw(3, 4, 64, 64, torch.float32, device)
    shard = VocabShard(0, 32, lambda x, op: x)
    for rows in (64, 31):
        with pytest.raises(ShapeError, match=rf"(?s)not this rank's shard.*{rows} rows, the shard 32"):
            linear_cross_entropy(x, weight[:rows], labels, LossSpec(vocab_size=64), shard=shard)


def test_same_bits_every_run(device):
    x, weight, labels, weights = draw(9, 32, 500, 500, torch.bfloat16, device)
    first, second = (
        ours(x, weight, labels, LossSpec(vocab_size=500), weights, chunk_tokens=4) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fused_wgrad", (False, True))
def test_compiles_without_a_graph_break(device, fused_wgrad):
    x, weight, labels, weights = draw(6, 8, 24, 21, torch.float32, device)
    spec, results = LossSpec(vocab_size=21, z_loss=0.01), []

    def run(x, weight, main_grad, total):
        how = {"main_grad": main_grad, "chunk_tokens": 4, "z_total": total}
        return linear_cross_entropy(x * 2, weight, labels, spec, weights, **how)

    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        main_grad = torch.zeros_like(weight) if fused_wgrad else None
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        total = torch.zeros((), device=device)
        fn(a, w, main_grad, total).backward()
        results.append((a.grad, main_grad if fused_wgrad else w.grad, total))
    assert results[0][2] > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bench_case_times_equal_things(device):
    case, results = bench._case(5, 8, 40), []
    inputs = case.make_inputs(torch.device(device), torch.float32)
    for name in ("fused", "eager"):
        inputs[3].zero_()
        loss = case.providers[name]()(*inputs)
        (dhidden,) = torch.autograd.grad(loss, inputs[0], retain_graph=name == "eager")
        if name == "eager":
            loss.backward()
        results.append((loss.detach(), dhidden, inputs[3].clone()))
    torch.testing.assert_close(*results)
    assert case.flops == 6 * 5 * 8 * 40


class Products:
    """The products with `weight`, noted as they are asked for."""

    def __init__(self, weight, calls):
        self.weight, self.calls = weight, calls

    def logits(self, hidden, logits):
        self.calls.append("logits")
        torch.mm(hidden, self.weight[: logits.shape[1]].t(), out=logits)

    def dhidden(self, dlogits, dhidden):
        self.calls.append("dhidden")
        torch.mm(dlogits, self.weight[: dlogits.shape[1]], out=dhidden)


def test_products_of_the_caller_take_the_place_of_the_gemms(device):
    """As the head in fp8 hands them in: here the same GEMMs, so the same bits, z-loss and all."""
    x, weight, labels, weights = draw(7, 16, 64, 61, torch.bfloat16, device)
    spec, calls = LossSpec(vocab_size=61, z_loss=0.02), []

    found = []
    for products in (None, Products(weight, calls)):
        total, main_grad = torch.zeros((), device=device), torch.zeros(64, 16, device=device)
        how = {"chunk_tokens": 4, "z_total": total, "main_grad": main_grad, "products": products}
        found.append((*ours(x, weight, labels, spec, weights, **how), total))
    assert calls == ["logits", "dhidden"] * 2 and found[0][3] > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def unfused_shards(x, weight, labels, spec, weights, starts):
    """(loss, gradients of x and of the weight, z-loss part) by the whole logits of each rank's own rows."""

    def run(shard):
        part = weight[shard.start : shard.start + shard.size]
        leaves = [t.detach().clone().requires_grad_() for t in (x, part)]
        logits, total = leaves[0] @ leaves[1].t(), torch.zeros((), device=x.device)
        how = {"shard": shard, "z_total": total, "impl": "reference"}
        loss = cross_entropy(logits, labels, spec, weights, **how).sum()
        return loss.detach(), *torch.autograd.grad(loss, leaves), total

    losses, dx, dweight, totals = zip(*in_turn(starts, len(weight), run), strict=True)
    return losses[0], sum(part.double() for part in dx).to(x.dtype), torch.cat(dweight), totals[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@settings(max_examples=5, deadline=None, derandomize=True)
@example(  # the last shard is nothing but padding
    tokens=7, hidden=8, vocab=30, padding=18, cuts=[16, 32], alone=None, chunk=3,
    loss=(0.1, 0.02), fused_wgrad=False, given_products=True,
)  # fmt: skip
@given(
    tokens=st.integers(0, 5), hidden=st.sampled_from((1, 7, 32)),
    vocab=st.sampled_from((2, 65, 127, 1001)) | st.integers(2, 1000), padding=st.sampled_from((0, 1, 25)),
    cuts=CUTS, alone=st.none() | ALONE, chunk=st.sampled_from((1, 4, None)),
    loss=st.sampled_from(((0.0, 0.0), (0.1, 0.02))), fused_wgrad=st.booleans(), given_products=st.booleans(),
)  # fmt: skip
def test_a_split_head_gives_the_whole_loss(
    device, tokens, hidden, vocab, padding, cuts, alone, chunk, dtype, loss, fused_wgrad, given_products
):
    """Shards of any sizes, all padding or a single entry too. Where products are given another multiplies."""
    spec = LossSpec(vocab_size=vocab, label_smoothing=loss[0], z_loss=loss[1])
    x, weight, labels, weights = draw(tokens, hidden, vocab + padding, vocab, dtype, device, seed=tokens)
    starts, calls = starts_of(vocab + padding, cuts, alone), []

    def run(shard):
        part, total = weight[shard.start : shard.start + shard.size], torch.zeros((), device=device)
        how = {"chunk_tokens": chunk, "shard": shard, "z_total": total, "impl": "triton"}
        if given_products:
            how["products"] = Products(part, calls)
        if fused_wgrad:
            how["main_grad"] = torch.zeros(part.shape, device=device)
        return *ours(x, part, labels, spec, weights, **how), total

    found = in_turn(starts, vocab + padding, run)
    chunks = -(-tokens // (chunk or max(tokens, 1)))
    assert calls == ["logits", "dhidden"] * (3 * len(starts) * chunks if given_products else 0)
    given = x, weight, labels, spec, weights
    plain, true = unfused_shards(*given, starts), exact(*given)
    z_part = true[0] - exact(x, weight, labels, LossSpec(vocab, loss[0]), weights)[0]
    for rank in found:
        assert_no_worse(rank[0], plain[0], true[0], "loss")
        assert_no_worse(rank[3], plain[3], z_part, "z-loss part")
    dx = sum(rank[1].double() for rank in found).to(dtype)
    assert_no_worse(dx, plain[1], true[1], "dhidden")
    # both sum logit gradients rounded to the compute dtype: its steps measure an fp32 main_grad too
    dweight = torch.cat([rank[2] for rank in found])
    assert_no_worse(dweight.to(dtype), plain[2], true[2], "dweight")
    assert (dweight[vocab:] == 0).all()
