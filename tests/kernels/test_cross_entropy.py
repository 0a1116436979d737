"""The token loss against float64 PyTorch: whole and sharded vocabulary, weights, ignored tokens, in place."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_accuracy import assert_no_worse
from shards import ALONE, CUTS, in_turn, starts_of
from wide import TOKENS, VOCABULARIES, some

from redline.errors import ConfigError, RedlineError, ShapeError
from redline.kernels.common import use_triton
from redline.kernels.cross_entropy import LossSpec, VocabShard, bench, cross_entropy, supports

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact_loss(logits, labels, spec, weights=None):
    """Float64, by PyTorch's own cross-entropy and none of the house's code."""
    x = logits.double()[:, : spec.vocab_size]
    count = spec.vocab_size
    smoothing = spec.label_smoothing * count / max(count - 1, 1)
    loss = F.cross_entropy(x, labels, ignore_index=-100, label_smoothing=smoothing, reduction="none")
    loss = loss + spec.z_loss * torch.where(labels >= 0, x.logsumexp(1) ** 2, 0.0)
    return loss if weights is None else loss * weights.double()


def exact(logits, labels, spec, weights=None, upstream=None):
    """(loss, gradient of the logits) in float64."""
    leaf = logits.detach().double().requires_grad_()
    loss = exact_loss(leaf, labels, spec, weights)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.double())
    return loss.detach(), leaf.grad


def ours(logits, labels, spec, weights=None, upstream=None, **kwargs):
    leaf = logits.detach().clone().requires_grad_()
    x = leaf * 1 if kwargs.get("inplace_grad") else leaf
    loss = cross_entropy(x, labels, spec, weights, **kwargs)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), leaf.grad


def draw(tokens, columns, vocab, dtype, device, seed=0, ignored=0.2):
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, columns, generator=gen) * 3).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=gen)
    labels[torch.rand(tokens, generator=gen) < ignored] = -100
    weights = torch.rand(tokens, generator=gen)
    return logits.to(device), labels.to(device), weights.to(device)


FORM = {
    "padding": st.sampled_from((0, 1, 13)),
    "smoothing": st.sampled_from((0.0, 0.1)),
    "z_loss": st.sampled_from((0.0, 1e-3)),
    "weighted": st.booleans(),
    "inplace": st.booleans(),
}


def check(device, tokens, vocab, padding, dtype, smoothing, z_loss, weighted, inplace, ignored=0.2):
    """No worse than the unfused path by more than a tenth; padded columns hold NaN, which must not matter."""
    logits, labels, weights = draw(tokens, vocab + padding, vocab, dtype, device, ignored=ignored)
    logits[:, vocab:] = float("nan")
    spec = LossSpec(vocab_size=vocab, label_smoothing=smoothing, z_loss=z_loss)
    weights = weights if weighted else None
    upstream = torch.linspace(0.5, 2.0, tokens, device=device)
    assert use_triton("cross_entropy", "auto", supports(logits))
    loss, grad = ours(logits, labels, spec, weights, upstream, inplace_grad=inplace)
    plain_loss, plain_grad = ours(logits, labels, spec, weights, upstream, impl="reference")
    true_loss, true_grad = exact(logits, labels, spec, weights, upstream)
    assert loss.dtype == torch.float32
    assert_no_worse(loss, plain_loss, true_loss, "loss")
    assert_no_worse(grad[:, :vocab], plain_grad[:, :vocab], true_grad[:, :vocab], "gradient")
    assert (grad[:, vocab:] == 0).all()
    assert (plain_grad[:, vocab:] == 0).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from((0, 1, 3, 7)), vocab=st.sampled_from((2, 3, 17, 64, 127, 1000, 4099)),
    dtype=st.sampled_from(DTYPES), **FORM,
)  # fmt: skip
def test_loss_and_gradient_match_float64(device, **form):
    check(device, **form)


@pytest.mark.parametrize("dtype", DTYPES)
@some
@given(tokens=TOKENS, vocab=VOCABULARIES, **FORM)
def test_any_vocabulary(device, dtype, **form):
    check(device, dtype=dtype, ignored=0.0, **form)


@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("sharded", (False, True))
def test_the_z_part_is_told_apart(device, impl, sharded):
    """It is what the loss has above the loss without; added to what is there, ignored tokens apart."""
    logits, labels, weights = draw(9, 40, 37, torch.float32, device)
    plain, spec = LossSpec(vocab_size=37, label_smoothing=0.1), LossSpec(37, 0.1, 0.03)
    shard = VocabShard(0, 40, lambda x, op: x) if sharded else None
    total = torch.tensor(1.5, device=device)
    loss = cross_entropy(logits, labels, spec, weights, shard=shard, z_total=total, impl=impl)
    part = (exact_loss(logits, labels, spec, weights) - exact_loss(logits, labels, plain, weights)).sum()
    torch.testing.assert_close(total.double() - 1.5, part, rtol=1e-5, atol=0)
    same = cross_entropy(logits, labels, spec, weights, shard=shard, impl=impl)
    assert torch.equal(loss, same) and part > 0.1
    with pytest.raises(ShapeError, match="z-loss of weight -1"):
        LossSpec(vocab_size=37, z_loss=-1.0)


def test_reference_in_float64_is_exact(device):
    logits, labels, weights = draw(9, 33, 31, torch.float64, device)
    spec = LossSpec(vocab_size=31, label_smoothing=0.2, z_loss=1e-2)
    loss, grad = ours(logits, labels, spec, weights)
    true_loss, true_grad = exact(logits, labels, spec, weights)
    torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-12)


def test_many_ignored_labels_keep_their_gradient(device):
    """B001: 60% of the labels ignored, mean over the valid ones."""
    logits, labels, _ = draw(20, 37, 37, torch.float32, device, ignored=0.6)
    valid = labels >= 0
    upstream = valid / valid.sum()
    _, grad = ours(logits, labels, LossSpec(vocab_size=37), upstream=upstream)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels, ignore_index=-100).backward()
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-8)
    assert grad.norm() > 0
    assert (grad[~valid] == 0).all()


@pytest.mark.parametrize("mode", ("plain", "no_grad", "inference"))
def test_forward_only_on_a_tiny_vocabulary(device, mode):
    """B003: the loss is right without a gradient, and the logits are untouched."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(device)
    labels, before = torch.zeros(4, dtype=torch.long, device=device), logits.clone()
    with {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        loss = cross_entropy(logits, labels, LossSpec(vocab_size=3))
    torch.testing.assert_close(loss, F.cross_entropy(before, labels, reduction="none"), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)


def test_a_vocabulary_above_250k(device):
    """B005: V = 262,147, one logit 30 above the rest: log-sum-exp within 1e-3, gradient rows sum to 0."""
    vocab = 262_147
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits[0, 200_003] = 30.0
    logits, label = logits.to(device), torch.tensor([5], device=device)
    loss, grad = ours(logits, label, LossSpec(vocab_size=vocab))
    lse = loss.double().cpu() + logits[0, 5].double().cpu()
    assert abs(lse.item() - logits.double().cpu().logsumexp(1).item()) < 1e-3
    assert abs(grad.double().sum().item()) < 1e-3


def test_mean_divides_by_the_tokens_that_count(device):
    """B007: three of eight tokens ignored: the mean has 5 below the line (8 would be 37.5% off)."""
    logits, labels, _ = draw(8, 50, 50, torch.float32, device, ignored=0.0)
    labels[torch.tensor([1, 4, 6])] = -1
    weights = (labels >= 0).float() / (labels >= 0).sum()
    mean = cross_entropy(logits, labels, LossSpec(vocab_size=50), weights).sum()
    kept = labels >= 0
    independent = -(logits[kept].double().log_softmax(1)[torch.arange(5), labels[kept]]).sum() / 5
    assert mean.item() == pytest.approx(independent.item(), rel=1e-6)
    assert mean.item() != pytest.approx(independent.item() * 5 / 8, rel=0.1)


def test_logits_are_untouched_unless_asked(device):
    """B011: accuracy read after the loss is the accuracy before it."""
    logits, labels, _ = draw(6, 40, 40, torch.bfloat16, device, ignored=0.0)
    labels[:3] = logits[:3].argmax(1)
    leaf = logits.clone().requires_grad_()
    cross_entropy(leaf, labels, LossSpec(vocab_size=40)).sum().backward()
    assert torch.equal(leaf.detach(), logits)
    assert (leaf.argmax(1) == labels).sum() >= 3


def test_in_place_gradient_refuses_what_it_cannot_do(device):
    logits, labels, _ = draw(4, 16, 16, torch.float32, device)
    leaf = logits.requires_grad_()
    spec = LossSpec(vocab_size=16)
    with pytest.raises(RedlineError, match="leaf"):
        cross_entropy(leaf, labels, spec, inplace_grad=True)
    loss = cross_entropy(leaf * 1, labels, spec, inplace_grad=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RedlineError, match="second backward"):
        loss.backward()
    x = leaf * 1
    other_user = x.square().sum()
    cross_entropy(x, labels, spec, inplace_grad=True).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other_user.backward()


def test_tokens_without_part_stop_nan_and_infinity(device):
    """0 x NaN must not appear: neither in the loss nor in the gradient, by label or by weight."""
    logits, labels, weights = draw(6, 30, 30, torch.float32, device, ignored=0.0)
    logits[1], logits[2] = float("nan"), float("inf")
    labels[1], weights[2] = -1, 0.0
    for impl in ("triton", "reference"):
        loss, grad = ours(logits, labels, LossSpec(vocab_size=30, z_loss=1e-3), weights, impl=impl)
        assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
        assert (loss[1:3] == 0).all() and (grad[1:3] == 0).all()
    upstream = torch.ones(6, device=device)
    upstream[1] = float("nan")
    assert (ours(logits, labels, LossSpec(vocab_size=30), upstream=upstream)[1][1] == 0).all()


def test_what_is_wrong_is_loud(device):
    logits, labels, _ = draw(3, 20, 18, torch.float32, device, ignored=0.0)
    labels[1] = 18
    for impl in ("triton", "reference"):
        loss = cross_entropy(logits, labels, LossSpec(vocab_size=18), impl=impl)
        assert loss.isnan().tolist() == [False, True, False]
    with pytest.raises(ShapeError, match="fewer columns"):
        cross_entropy(logits, labels, LossSpec(vocab_size=21))
    for wrong in (labels.float(), labels > 3):
        with pytest.raises(ShapeError, match="integers"):
            cross_entropy(logits, wrong, LossSpec(vocab_size=20))
    with pytest.raises(ShapeError, match="same T"):
        cross_entropy(logits, labels[:2], LossSpec(vocab_size=20))
    with pytest.raises(ConfigError, match="float64"):
        cross_entropy(logits.double(), labels, LossSpec(vocab_size=20), impl="triton")
    with pytest.raises(ShapeError, match="smoothing"):
        LossSpec(vocab_size=20, label_smoothing=1.0)


def test_all_logits_masked_but_one(device):
    """-inf logits have probability 0 and gradient 0; a tile of nothing but -inf is no NaN."""
    logits = torch.full((2, 300), -math.inf, device=device)
    logits[0, 299], logits[1, 0] = 1.0, -2.0
    loss, grad = ours(logits, torch.tensor([299, 0], device=device), LossSpec(vocab_size=300))
    assert loss.tolist() == [0.0, 0.0]
    assert (grad == 0).all()


def test_views_with_any_stride(device):
    """B015's kind: strided columns, strided rows, an expanded upstream gradient."""
    base = torch.randn(5, 80, generator=torch.Generator().manual_seed(3)).to(device)
    labels = torch.arange(10, device=device)[::2]
    spec = LossSpec(vocab_size=40)
    for view in (base[:, ::2], base[:, :40], base.t().contiguous().t()[:, 40:]):
        leaf = view.detach().requires_grad_()
        loss = cross_entropy(leaf, labels, spec)
        loss.sum().backward()
        true_loss, true_grad = exact(view, labels, spec)
        torch.testing.assert_close(loss.detach().double(), true_loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(leaf.grad.double(), true_grad, rtol=1e-5, atol=1e-7)


SMOOTHED = {"smoothing": 0.1, "z_loss": 1e-3, "weighted": True, "inplace": False}


def sharded(logits, labels, spec, weights, starts, impl, upstream, inplace=False):
    """(loss, gradient of the logits) of ranks that hold some columns each."""

    def run(shard):
        leaf = logits[:, shard.start : shard.start + shard.size].detach().clone().requires_grad_()
        how = {"shard": shard, "inplace_grad": inplace, "impl": impl}
        return cross_entropy(leaf * 1 if inplace else leaf, labels, spec, weights, **how), leaf

    results = in_turn(starts, logits.shape[1], run)
    for loss, _ in results:
        assert torch.equal(loss, results[0][0])
        loss.backward(upstream)
    return results[0][0].detach(), torch.cat([leaf.grad for _, leaf in results], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None, derandomize=True)
@example(tokens=7, vocab=75, padding=25, cuts=[20, 60, 80], alone=None, **SMOOTHED)  # one of padding
@example(tokens=0, vocab=75, padding=0, cuts=[20], alone=None, **SMOOTHED)
@given(
    tokens=st.integers(1, 5), vocab=st.sampled_from((127, 17, 2, 1000)) | st.integers(2, 1500),
    padding=st.sampled_from((0, 1, 25)), cuts=CUTS, alone=st.none() | ALONE,
    smoothing=st.sampled_from((0.0, 0.1)), z_loss=st.sampled_from((0.0, 1e-3)), weighted=st.booleans(),
    inplace=st.booleans(),
)  # fmt: skip
def test_a_split_vocabulary_gives_the_whole_loss(
    device, tokens, vocab, padding, cuts, alone, dtype, smoothing, z_loss, weighted, inplace
):
    """Shards of any sizes, all padding or a single entry too; smoothing uses the global vocabulary."""
    logits, labels, weights = draw(tokens, vocab + padding, vocab, dtype, device, seed=tokens)
    logits[:, vocab:] = float("nan")
    weights, upstream = weights if weighted else None, torch.linspace(0.5, 2.0, tokens, device=device)
    spec = LossSpec(vocab_size=vocab, label_smoothing=smoothing, z_loss=z_loss)
    given = logits, labels, spec, weights, starts_of(vocab + padding, cuts, alone)
    loss, grad = sharded(*given, "triton", upstream, inplace)
    plain_loss, plain_grad = sharded(*given, "reference", upstream)
    true_loss, true_grad = exact(logits, labels, spec, weights, upstream)
    assert_no_worse(loss, plain_loss, true_loss, "loss")
    assert_no_worse(grad[:, :vocab], plain_grad[:, :vocab], true_grad[:, :vocab], "gradient")
    # The plain path is held to float64 by itself: steps of the logits' dtype, of fp32 in the loss.
    torch.testing.assert_close(plain_loss.double(), true_loss, rtol=2e-6, atol=2e-6)
    rtol = 1e-5 + torch.finfo(dtype).eps
    torch.testing.assert_close(plain_grad[:, :vocab].double(), true_grad[:, :vocab], rtol=rtol, atol=1e-7)
    assert (grad[:, vocab:] == 0).all() and (plain_grad[:, vocab:] == 0).all()


def test_whole_logits_in_the_sharded_loss_are_refused(device):
    """B009: never the plain loss + ln 2."""
    logits, labels, _ = draw(3, 64, 64, torch.float32, device)
    with pytest.raises(ShapeError, match="not this rank's shard"):
        cross_entropy(logits, labels, LossSpec(vocab_size=64), shard=VocabShard(0, 32, lambda x, op: x))


def test_same_bits_every_run(device):
    logits, labels, weights = draw(5, 5000, 5000, torch.bfloat16, device)
    spec = LossSpec(vocab_size=5000, label_smoothing=0.1)
    first, second = (ours(logits, labels, spec, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("inplace", (False, True))
def test_compiles_without_a_graph_break(device, inplace):
    logits, labels, weights = draw(4, 50, 48, torch.float32, device)
    spec, totals = LossSpec(vocab_size=48, z_loss=0.01), torch.zeros(2, device=device)

    def run(x, total):
        return cross_entropy(x * 2, labels, spec, weights, inplace_grad=inplace, z_total=total).sum()

    eager, traced = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    run(eager, totals[0]).backward()
    torch.compile(run, backend="aot_eager", fullgraph=True)(traced, totals[1]).backward()
    assert torch.equal(eager.grad, traced.grad) and totals[0] == totals[1] > 0


def test_bench_case_times_equal_things(device):
    case = bench._case(3, 40)
    inputs = case.make_inputs(torch.device(device), torch.float32)
    fused, eager = (case.providers[name]()(*inputs) for name in ("fused", "eager"))
    torch.testing.assert_close(fused, eager)
    assert [case.bytes_forward, case.bytes_backward] == [3 * 40 * 2 + 3 * 16, 2 * 3 * 40 * 2 + 3 * 16]
