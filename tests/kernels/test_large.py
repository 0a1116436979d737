"""B019: past 2^31 elements offsets have 64 bits: what lies there is what the same numbers give alone.

Each case compares the end of large tensors, bit for bit, with a call on a copy of that end: what a kernel
makes of it is held to float64 elsewhere.
"""

from __future__ import annotations

import fcntl
import gc

import pytest
import torch

from redline.kernels import fp8
from redline.kernels.adamw import FlatState, adamw_, adamw_hyper, make_segments, split_main
from redline.kernels.bias_dropout_add import DropoutKey, bias_dropout_add
from redline.kernels.bias_gelu import bias_gelu
from redline.kernels.bias_swiglu import bias_swiglu
from redline.kernels.cross_entropy import LossSpec, cross_entropy
from redline.kernels.embedding import embedding
from redline.kernels.grad_norm import grad_statistics
from redline.kernels.layer_norm import add_layer_norm
from redline.kernels.masked_softmax import masked_softmax
from redline.kernels.qk_norm import QKNormParams, qk_norm
from redline.kernels.rms_norm import rms_norm
from redline.kernels.rotary import rotary, rotary_qkv

pytestmark = pytest.mark.gpu
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
WIDE = 16384  # columns of a row: 2^31 elements are 131,072 of them
LIMIT = 2**31
ROWS = LIMIT // WIDE + 8


@pytest.fixture(autouse=True)
def _room(tmp_path_factory):
    """Skips where the largest case, of some 40 GiB, would not fit; leaves no memory behind.

    One at a time, however many processes test at once: together they would need the memory of three cards.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 48 * 2**30:
        pytest.skip("needs a GPU with 48 GiB")
    with (tmp_path_factory.getbasetemp().parent / "large.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until it is closed
        yield
        gc.collect()
        torch.cuda.empty_cache()


def zeros_with_an_end(*shape, end=4, seed=0):
    """bf16 [rows, ...] that is 0 but in its last rows: those are what is looked at."""
    x = torch.zeros(shape, dtype=BF16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    x[-end:] = torch.randn(x[-end:].shape, device="cuda", generator=generator)
    return x


def same_end(fn, inputs, grads):
    """Outputs of fn and gradients of its inputs end as those of fn on the ends alone.

    Inputs and outputs have rows first; `fn(*inputs)` gives a tensor or a tuple of them.
    """
    results = []
    for cut in (lambda t: t, lambda t: t[-4:].clone()):
        leaves = [cut(x.detach()).requires_grad_() for x in inputs]
        out = fn(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        found = torch.autograd.grad(out, leaves, [cut(grad) for grad in grads])
        results.append([t.detach()[-4:].clone() for t in (*out, *found)])
        del out, found, leaves
    for large, alone in zip(*results, strict=True):
        assert torch.equal(large, alone)
        assert large.isfinite().all() and large.any()


@pytest.mark.parametrize("hidden", [4096, WIDE])
def test_norms(hidden):
    """Backward of the wider one does not fetch its rows ahead."""
    weight, bias = torch.randn(2, hidden, dtype=BF16, device="cuda").unbind()
    rows = LIMIT // hidden + 8
    x, residual, dy, dsum = (zeros_with_an_end(rows, hidden, seed=seed) for seed in range(4))
    same_end(lambda x: rms_norm(x, weight, impl="triton"), [x], [dy])
    same_end(
        lambda x, residual: add_layer_norm(x, residual, weight, bias, impl="triton"),
        [x, residual],
        [dy, dsum],
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [bias_swiglu, bias_gelu])
def test_activations(activation, biased):
    """A bias has backward walk down strips of columns."""
    bias = torch.randn(WIDE, dtype=BF16, device="cuda") if biased else None
    x, dy = zeros_with_an_end(ROWS, WIDE), zeros_with_an_end(ROWS, WIDE, seed=1)
    dy = dy[:, : WIDE // 2] if activation is bias_swiglu else dy
    same_end(lambda x: activation(x, bias, impl="triton"), [x], [dy])


@pytest.mark.parametrize("biased", [False, True])
def test_bias_dropout_add(biased):
    batch, hidden = 4, 4096
    length = LIMIT // (batch * hidden) + 8
    generator = torch.Generator("cuda").manual_seed(5)
    bias = torch.randn(hidden, dtype=BF16, device="cuda", generator=generator) if biased else None
    x, residual, dy = (zeros_with_an_end(length, batch, hidden, seed=seed) for seed in range(3))
    key, samples = torch.tensor([7, 9], device="cuda"), torch.arange(batch, device="cuda")
    iteration, places = torch.tensor(3, device="cuda"), torch.arange(length, device="cuda")

    def drop(x, residual):
        draw = DropoutKey(key, iteration, samples, places[-len(x) :])
        return bias_dropout_add(x, bias, residual, 0.3, draw, impl="triton")

    same_end(drop, [x, residual], [dy])


def test_cross_entropy():
    tokens, vocab = LIMIT // 128 + 4096, 128
    generator = torch.Generator("cuda").manual_seed(4)
    logits = torch.randn(tokens, vocab, device="cuda", dtype=BF16, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    spec, ones = LossSpec(vocab_size=vocab), torch.ones(tokens, device="cuda")
    same_end(lambda x: cross_entropy(x, labels[-len(x) :], spec, impl="triton"), [logits], [ones])


def test_embedding():
    """Each token has a row of its own, in reverse order, so that a gradient is a copy of what comes in."""
    tokens, vocab = ROWS, ROWS + 9
    generator = torch.Generator("cuda").manual_seed(6)
    weight, dout = (
        torch.randn(rows, WIDE, dtype=BF16, device="cuda", generator=generator) for rows in (vocab, tokens)
    )
    main_grad = torch.zeros(vocab, WIDE, device="cuda")
    ids = vocab - 1 - torch.arange(tokens, device="cuda")
    out = embedding(ids, weight.requires_grad_(), main_grad=main_grad, impl="triton")
    out.backward(dout)
    for part in (slice(0, 5), slice(tokens // 2, tokens // 2 + 5), slice(tokens - 5, tokens)):
        assert torch.equal(out[part], weight[ids[part]])
        assert torch.equal(main_grad[ids[part]], dout[part].float())
    assert (main_grad[: vocab - tokens] == 0).all()


def test_masked_softmax():
    """Causality, a mask of its own for each head, and padding; the last head is looked at."""
    length = 8192
    heads = LIMIT // length**2 + 1
    scores, dy = (torch.zeros(1, heads, length, length, dtype=BF16, device="cuda") for _ in range(2))
    mask = torch.zeros(scores.shape, dtype=torch.bool, device="cuda")
    generator = torch.Generator("cuda").manual_seed(7)
    for each in (scores, dy):
        each[0, -1] = torch.randn(length, length, dtype=BF16, device="cuda", generator=generator)
    mask[0, -1] = torch.rand(length, length, device="cuda", generator=generator) < 0.3
    lengths = torch.tensor([length - length // 8], device="cuda")
    results = []
    for first in (0, heads - 1):
        x = scores[:, first:].clone().requires_grad_()
        y = masked_softmax(x, 0.5, causal=True, mask=mask[:, first:], lengths_B=lengths, impl="triton")
        (dx,) = torch.autograd.grad(y, x, dy[:, first:])
        results.append((y.detach()[0, -1].clone(), dx[0, -1].clone()))
        del x, y, dx
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*results, strict=True))


def table(positions, half):
    angle = torch.arange(positions, device="cuda")[:, None] * 1e4 ** -(
        torch.arange(half, device="cuda") / half
    )
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("merged", [False, True])
def test_rotary(merged):
    """The end of the sequence with the end of the table."""
    heads, groups, dim = (96, 16, 128) if merged else (128, 8, 128)
    cos, sin = table(ROWS, dim // 2)
    sizes = {"num_heads": heads, "num_groups": groups, "head_dim": dim}

    def turn(*tensors):
        how = {"rotary_dim": dim, "impl": "triton"}
        angles = cos[-len(tensors[0]) :], sin[-len(tensors[0]) :]
        if merged:
            return rotary_qkv(tensors[0] * 1, *angles, **sizes, **how)
        return rotary(*tensors, *angles, **how)

    counts = (heads, groups, groups) if merged else (heads, groups)
    grads = [zeros_with_an_end(ROWS, 1, count, dim, seed=count) for count in counts]
    if merged:
        inputs = [zeros_with_an_end(ROWS, 1, (heads + 2 * groups) * dim)]
    else:
        inputs = [zeros_with_an_end(ROWS, 1, count, dim, seed=count + 1) for count in counts]
    same_end(turn, inputs, grads)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_qk_norm(kind):
    heads, groups, dim = 96, 16, 128
    names = ["q_weight", "k_weight"] + (["q_bias", "k_bias"] if kind == "layer" else [])
    generator = torch.Generator("cuda").manual_seed(8)
    params = QKNormParams(
        **{name: torch.randn(dim, dtype=BF16, device="cuda", generator=generator) for name in names}
    )
    sizes = {"num_heads": heads, "num_groups": groups, "head_dim": dim, "kind": kind}
    qkv = zeros_with_an_end(ROWS, 1, (heads + 2 * groups) * dim)
    grads = [zeros_with_an_end(ROWS, 1, n, dim, seed=i) for i, n in enumerate((heads, groups, groups))]
    same_end(lambda x: qk_norm(x, params, **sizes, impl="triton"), [qkv], grads)


@pytest.mark.parametrize("coded", [False, True])
def test_adamw(coded):
    """Two groups meet past 2^31; the end, from a block of codes on, is what it is as a buffer of its own."""
    size, end, first_of_second = LIMIT + 2**20, 4096, 1000
    generator = torch.Generator("cuda").manual_seed(9)
    param, remainder = split_main(torch.randn(end, device="cuda", generator=generator))

    def buffer(elements, last):
        x = torch.zeros(elements, dtype=last.dtype, device="cuda")
        x[-len(last) :] = last
        return x

    def state(elements):
        grad = torch.linspace(-1, 1, end, device="cuda").to(BF16)
        main = {"main": buffer(elements, remainder)}
        if not coded:
            moment = torch.linspace(0, 0.1, end, device="cuda").to(BF16)
            moments = [buffer(elements, moment) for _ in range(2)]
            return FlatState(buffer(elements, param), buffer(elements, grad), *moments, **main)
        codes = [torch.zeros(elements, dtype=torch.uint8, device="cuda") for _ in range(2)]
        tops = [torch.zeros(elements // 64, dtype=torch.int16, device="cuda") for _ in range(2)]
        main |= {"exp_avg_top": tops[0], "exp_avg_sq_top": tops[1]}
        return FlatState(buffer(elements, param), buffer(elements, grad), *codes, **main)

    hyper = adamw_hyper(
        step=2, lr=[1e-2, 1e-1], weight_decay=[0.1, 0.0], beta1=0.9, beta2=0.95, eps=1e-8, device="cuda"
    )
    results = []
    for elements in (size, end):
        held = state(elements)
        bounds = [0, elements - end + first_of_second]
        segments = make_segments(bounds, [0, 1], elements, "cuda")
        adamw_(held, hyper, segments, impl="triton")
        written = [held.param[-end:], held.main[-end:], held.exp_avg[-end:], held.exp_avg_sq[-end:]]
        if coded:
            written += [held.exp_avg_top[-end // 64 :], held.exp_avg_sq_top[-end // 64 :]]
        results.append([x.clone() for x in written])
        del held, written
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], param)


def test_grad_norm():
    """Zeros but for the last elements and one just past 2^31: the counts are exact, the sum as well."""
    grad = torch.zeros(LIMIT + 70_003, dtype=BF16, device="cuda")
    grad[LIMIT + 1], grad[-3:] = 2.0, torch.tensor([3.0, -4.0, 5.0], dtype=BF16)
    assert grad_statistics([grad[:7], grad], impl="triton").tolist() == [54.0, 0.0, 4.0]
    grad[-2] = torch.inf
    assert grad_statistics([grad], impl="triton")[1:].tolist() == [1.0, 4.0]


def test_fp8():
    """Casts, both layouts; the end in T is the last columns of what is turned."""
    rows, end = LIMIT // WIDE + 256, 256
    x, dy = zeros_with_an_end(rows, WIDE, end=end), zeros_with_an_end(rows, WIDE // 2, end=end, seed=1)
    weight = torch.randn(WIDE, dtype=BF16, device="cuda")
    scale = torch.full((1,), 8.0, device="cuda")
    silu = ("silu", True, None, 0.0)

    def made(x, dy):
        """The end of each result, and the largest values."""
        amaxes = torch.zeros(4, 1, device="cuda")
        both = fp8.cast(x, scale, amaxes[0], E4M3, True, True, True)
        straight = fp8.cast(x, scale, amaxes[0], E4M3, True, False, True)[0]
        normed = fp8.norm_cast(x, weight, None, False, 1e-5, False, scale, amaxes[1], E4M3, True)[0]
        active = fp8.activation_cast(x, None, *silu, scale, amaxes[2], E4M3, True)
        back = fp8.activation_cast_backward(dy, x, None, None, *silu, scale, amaxes[3], E5M2, True)
        blocks = fp8.block_cast(x, E4M3, 128, True, True)
        upright = [both[0], straight, normed, active, back[0], blocks[0]]
        turned = [both[1], fp8.transpose(straight, True), back[1], blocks[1], blocks[2]]
        ends = [t[-end:] for t in upright] + [t[:, -end:] for t in turned] + [blocks[3][-1:]]
        return [t.clone().view(torch.uint8) for t in ends] + [amaxes]

    for large, alone in zip(made(x, dy), made(x[-end:], dy[-end:]), strict=True):
        assert torch.equal(large, alone) and large.any()


def test_fp8_weights():
    """The end has squares of its own."""
    w = zeros_with_an_end(LIMIT // WIDE + 128, WIDE, end=128)
    (q, inverse, qt, inverse_t), small = fp8.square_cast(w, E4M3, True), fp8.square_cast(w[-128:], E4M3, True)
    ends = q[-128:], inverse[-1:, : WIDE // 128], qt[:, -128:], inverse_t[:, len(w) // 128 - 1]
    alone = small[0], small[1][:, : WIDE // 128], small[2], small[3][:, 0]
    for one, other in zip(ends, alone, strict=True):
        assert torch.equal(one.float(), other.float()) and one.float().any()
