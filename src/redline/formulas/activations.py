"""What one microbatch keeps for backward, and what it needs on top for a moment: a table, one line a tensor.

Every autograd node of model/, attention/ and the fused operators saves what stands here. e is the size of the
compute dtype, w that of the wide one (fp32, or fp64 under fp64) in which plain norms, softmax and loss run;
T = S * B tokens. A fused operator keeps its input in the compute dtype and a few fp32 numbers a row, and
draws dropout masks again; queries and keys are turned in place.

Vectors of the hidden size (gains and biases read in the wide dtype) are left out; they are a few kB a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from redline.formulas.operators import Operator
from redline.formulas.recompute import NOTHING, Module, Recompute
from redline.formulas.shape import ModelShape
from redline.formulas.state import ITEM_BYTES
from redline.units import GIB

BOOL, INT64, FP32 = 1, 8, 4
LOGITS_BYTES = GIB  # of one chunk of the loss without logits
GEMM_TILE, ROW_ALIGNMENT = 128, 64  # its chunks are multiples of the first, its rows of the second


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchShape:
    """What decides the size of activations.

    Attributes:
        seq_length, micro_batch_size: S and B.
        dtype: of compute: "fp64" "fp32" "bf16" "fp16".
        attention: the backend: "unfused" keeps probabilities; "flash", "fused" and "local" keep output and
            log-sum-exp.
        device: "cuda" or "cpu": PyTorch's norm and GEMM kernels keep and copy different things.
        fuse_wgrad: weight gradients are added to main_grad inside their GEMM.
        grad_dtype: of main_grad.
        segments: documents are kept apart by a mask of every sample.
        fused: the operators that run as Redline's kernels; the others are plain PyTorch.
        recompute: what is dropped in forward and computed again.
        tp, sequence: tensor-parallel ranks, and whether they share the sequence too.
        z_loss: the loss has a part of the log-partition; only the plain one keeps more for it.
        fp8: GEMMs of the layers keep their input in fp8.
        fp8_weights: elements of the layers' weights that GEMMs read in fp8.
        fp8_copies: casts of each that are kept: by rows, and transposed unless that is made each time.
        fp8_stored: those weights exist in fp8 alone, which is one of these copies.
        fp8_head: elements of the head, where it runs in fp8; it is kept in both layouts.
        offload_layers: how many layers, from the first, keep what they save in host memory.
    """

    seq_length: int
    micro_batch_size: int = 1
    dtype: str = "bf16"
    attention: str = "flash"
    device: Literal["cpu", "cuda"] = "cuda"
    fuse_wgrad: bool = True
    grad_dtype: str = "fp32"
    segments: bool = False
    fused: frozenset[Operator] = frozenset()
    recompute: Recompute = NOTHING
    tp: int = 1
    sequence: bool = False
    offload_layers: int = 0
    z_loss: bool = False
    fp8: bool = False
    fp8_weights: int = 0
    fp8_copies: int = 2
    fp8_stored: bool = False
    fp8_head: int = 0

    @property
    def operand(self) -> int:
        """Bytes of a kept GEMM operand."""
        return 1 if self.fp8 else self.item

    @property
    def tokens(self) -> int:
        """T = S * B."""
        return self.seq_length * self.micro_batch_size

    @property
    def rows(self) -> int:
        """Tokens of the residual stream that a rank holds: T, or T/tp where the ranks share the sequence."""
        return self.tokens // self.tp if self.sequence else self.tokens

    @property
    def item(self) -> int:
        """e, bytes of the compute dtype."""
        return ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """w, bytes of the dtype of norms, softmax and loss."""
        return max(self.item, ITEM_BYTES["fp32"])

    @property
    def copies_for_wgrad(self) -> bool:
        """Whether a weight gradient first widens both of its operands (no CPU kernel mixes dtypes)."""
        return self.fuse_wgrad and self.device == "cpu" and self.grad_dtype != self.dtype


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor: the part of the model, the site, what it is, how many bytes."""

    part: Literal["embedding", "attention", "mlp", "head"]
    site: str
    what: str
    num_bytes: int


def total_bytes(held: Iterable[Held]) -> int:
    """Their sum."""
    return sum(each.num_bytes for each in held)


def saved_by_layer(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """What one layer keeps for backward, if it is in no unit of full recompute."""
    kept = list(_made_by_layer(shape, run))
    T, e = run.tokens, run.item
    stream, curve = run.rows * shape.hidden * e, T * shape.fc1_size * e
    instead: list[tuple[Module, str, Held]] = [
        ("layernorm", "attention.norm attention.qkv", Held("attention", "attention.norm", "input", stream)),
        ("layernorm", "mlp.norm mlp.fc1:input", Held("mlp", "mlp.norm", "input", stream)),
        ("activation", "mlp.activation mlp.fc1:output mlp.fc2", Held("mlp", "mlp.fc1", "output", curve)),
        ("mlp", "mlp", Held("mlp", "mlp", "input", stream)),
    ]
    operands = ("attention.qkv", "mlp.fc1:input", "mlp.fc2") if run.fp8 else ()  # kept by the GEMM, cast
    for module, gone, held in instead:
        if run.recompute.drops(module):
            names = [name for name in gone.split() if name not in operands]
            kept = [*(each for each in kept if not _among(each, names)), held]
    return tuple(kept)


def _among(held: Held, names: list[str]) -> bool:
    """Whether one of `names` names the tensor: its part, its site, or "site:what"."""
    return not {held.part, held.site, f"{held.site}:{held.what}"}.isdisjoint(names)


def unit_input(shape: ModelShape, run: MicrobatchShape) -> Held:
    """What a unit of full recompute keeps: the residual stream before its first layer, or a rank's part."""
    ranks = run.tp if run.recompute.spread else 1
    return Held("attention", "unit", "input", -(-run.rows * shape.hidden // ranks) * run.item)


def rebuilt_by_layer(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """What selective recompute dropped and a layer makes again for its backward, by part."""
    plain = replace(run, recompute=NOTHING)
    again = []
    if run.recompute.drops("core_attn"):
        kept = set(_attention(shape, run))
        again += [held for held in _attention(shape, plain) if held not in kept]
    if run.recompute.drops("mlp"):
        again += [held for held in _made_by_layer(shape, plain) if held.part == "mlp"]
        again.append(Held("mlp", "mlp", "input, kept once", -shared_stream(shape, run)))
    elif run.recompute.drops("activation"):
        T, e = run.tokens, run.item
        again += _activation(shape, plain)
        again += [] if run.fp8 else [Held("mlp", "mlp.fc2", "input", T * shape.ffn * e)]
        again.append(Held("mlp", "mlp.fc1", "output, kept once", -T * shape.fc1_size * e))
    return tuple(again)


def shared_stream(shape: ModelShape, run: MicrobatchShape) -> int:
    """Bytes of the residual stream where a norm keeps it as it is, and not a wide copy."""
    itself = "norm" in run.fused or run.wide == run.item
    return run.rows * shape.hidden * run.item if itself else 0


def _made_by_layer(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """Everything a layer would keep."""
    T, R, e = run.tokens, run.rows, run.operand
    gathered = T if run.fp8 else R  # a GEMM in fp8 keeps what it multiplied, not its own rows of it
    saved = [
        *_norm(shape, run, "attention", "attention.norm", R, shape.hidden, fused="norm" in run.fused),
        Held("attention", "attention.qkv", "input", gathered * shape.hidden * e),
        *_attention(shape, run),
        Held("attention", "attention.proj", "input", T * shape.q_size * e),
        *_norm(shape, run, "mlp", "mlp.norm", R, shape.hidden, fused="norm" in run.fused),
        Held("mlp", "mlp.fc1", "input", gathered * shape.hidden * e),
        *_activation(shape, run),
        Held("mlp", "mlp.fc2", "input", T * shape.ffn * e),
    ]
    if shape.hidden_dropout and "bias_dropout_add" not in run.fused:
        saved.append(Held("attention", "attention.dropout", "mask", R * shape.hidden * BOOL))
        saved.append(Held("mlp", "mlp.dropout", "mask", R * shape.hidden * BOOL))
    return tuple(held for held in saved if held.num_bytes)


def saved_by_embedding(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """The batch itself (tokens, labels, positions, loss weights), rotary tables, the embedding's mask."""
    T = run.tokens
    saved = [
        Held("embedding", "batch", "tokens, labels, positions", 3 * T * INT64),
        Held("embedding", "batch", "loss weights", T * ITEM_BYTES["fp32"]),
    ]
    if shape.position == "rope":
        saved.append(Held("embedding", "rope", "cos, sin", run.seq_length * shape.rotary_dim * run.wide))
    if shape.hidden_dropout and "bias_dropout_add" not in run.fused:
        saved.append(Held("embedding", "dropout", "mask", run.rows * shape.hidden * BOOL))
    return tuple(saved)


def saved_by_head(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """Final norm, head and loss."""
    T, H = run.tokens, shape.hidden
    norm = tuple(_norm(shape, run, "head", "final_norm", run.rows, H, fused="norm" in run.fused))
    if "linear_cross_entropy" in run.fused:
        saved = [
            Held("head", "loss", "gradient of the hidden states", T * H * run.item),
            Held("head", "loss", "mask", T * BOOL),
        ]
        if not run.fuse_wgrad:
            weight = shape.padded_vocab_size * H * run.item
            saved.append(Held("head", "head", "weight gradient before it is added", weight))
        return (*norm, *saved)
    if "cross_entropy" in run.fused or run.tp > 1:  # the loss of a split vocabulary keeps logits either way
        return (
            *norm,
            Held("head", "head", "input", T * H * run.item),
            Held("head", "loss", "logits, padded", T * shape.padded_vocab_size * run.item),
            Held("head", "loss", "labels, weights, log-sum-exp, mask", T * (INT64 + 2 * run.wide + BOOL)),
        )
    # Of a z-loss: where the logits are wide already, they are kept as they are, padded.
    columns = shape.vocab_size if run.wide > run.item else shape.padded_vocab_size
    z_part = [Held("head", "loss", "wide logits", T * columns * run.wide)] if run.z_loss else []
    return (
        *norm,
        *z_part,
        Held("head", "head", "input", T * H * run.item),
        Held("head", "loss", "log probabilities", T * shape.vocab_size * run.wide),
        Held("head", "loss", "labels, weights, mask", T * (INT64 + run.wide + BOOL)),
    )


def loss_workspace(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """Needed on top of all that is saved while the loss runs: forward or backward, whichever is more."""
    T, V, e, w = run.tokens, shape.vocab_size, run.item, run.wide
    padded = shape.padded_vocab_size
    caller = Held("head", "head", "hidden states held by the caller", T * shape.hidden * e)
    if "linear_cross_entropy" in run.fused:
        return (caller, *_chunk_workspace(shape, run))
    if "cross_entropy" in run.fused:  # the gradient of the logits takes their place
        dhidden = Held("head", "head", "gradient of the hidden states", T * shape.hidden * e)
        wide = T * (padded + shape.hidden) * ITEM_BYTES[run.grad_dtype] * run.copies_for_wgrad
        widened = Held("head", "head", "wide operands of the weight gradient", wide)
        return tuple(max([caller], [dhidden, widened], key=total_bytes))
    forward = [caller, Held("head", "loss", "logits, padded", T * padded * e)]
    if w > e or padded > V:  # the softmax reads a dense copy without the padding
        forward.append(Held("head", "loss", "wide logits", T * V * w))
    backward = [
        caller,
        Held("head", "loss", "gradient of the log probabilities", T * V * w),
        Held("head", "loss", "gradient of the logits", T * V * w),
    ]
    return tuple(max(forward, backward, key=total_bytes))


def loss_chunk_tokens(tokens: int, vocab_size: int, item: int) -> int:
    """Tokens a chunk of the loss without logits: the fewest equal chunks below LOGITS_BYTES."""
    row = _round_up(vocab_size, ROW_ALIGNMENT) * item
    most = max(LOGITS_BYTES // row // GEMM_TILE, 1) * GEMM_TILE
    chunks = -(-tokens // most)
    return min(_round_up(-(-tokens // max(chunks, 1)), GEMM_TILE), most)


def _chunk_workspace(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """While the loss without logits walks its chunks, beside the gradients that it leaves."""
    T, H, e = run.tokens, shape.hidden, run.item
    rows = min(loss_chunk_tokens(T, shape.vocab_size, e), T)
    columns = _round_up(shape.vocab_size, ROW_ALIGNMENT)
    held = [
        Held("head", "loss", "hidden states that count", T * H * e),
        Held("head", "loss", "logits of a chunk", rows * columns * e),
    ]
    if run.copies_for_wgrad:
        wide = rows * (columns + H) * ITEM_BYTES[run.grad_dtype]
        held.append(Held("head", "head", "wide operands of the weight gradient", wide))
    if not run.fuse_wgrad and rows < T:
        held.append(Held("head", "head", "weight gradient over chunks", shape.padded_vocab_size * H * FP32))
    return tuple(held)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def mlp_workspace(shape: ModelShape, run: MicrobatchShape, again: bool = False) -> tuple[Held, ...]:
    """Needed on top of the saved layers while the last MLP runs: forward, mask drawing or backward.

    Args:
        again: its forward runs inside backward, beside the gradient of the residual stream.
    """
    run = replace(run, recompute=NOTHING)
    T, H, F, e, w = run.tokens, shape.hidden, shape.ffn, run.item, run.wide
    forward, draws = [], []
    plain = "activation" not in run.fused
    if shape.bias_linear and plain:
        forward.append(Held("mlp", "mlp.fc1", "output before its bias", T * shape.fc1_size * e))
    if (
        shape.bias_linear and plain and w > e
    ):  # at this moment what the activation will keep does not exist yet
        later = total_bytes(_activation(shape, run)) - T * shape.fc1_size * e + T * F * e
        forward.append(Held("mlp", "mlp.fc1", "wide output with its bias", T * shape.fc1_size * w - later))
    if shape.hidden_dropout and "bias_dropout_add" not in run.fused:
        draws.append(Held("mlp", "mlp.dropout", "mask drawing", _mask_drawing(run.seq_length * H, run)))
    through_activation = 2 if shape.gated else 3 if shape.activation == "squared-relu" and plain else 1
    backward = [Held("mlp", "mlp.fc2", "gradients through the activation", through_activation * T * F * e)]
    if run.copies_for_wgrad:
        grad = ITEM_BYTES[run.grad_dtype]
        widened = [
            Held("mlp", "mlp.fc2", "gradient of the input", T * F * e),
            Held("mlp", "mlp.fc2", "wide operands of the weight gradient", T * (F + H) * grad),
        ]
        freed = total_bytes(_activation(shape, run)) + T * F * e  # by then; the rest as for fc2
        product = [
            Held("mlp", "mlp.fc1", "gradient of the output", T * shape.fc1_size * e - freed),
            Held("mlp", "mlp.fc1", "wide operands of the weight gradient", T * (shape.fc1_size + H) * grad),
        ]
        backward = max(backward, widened, product, key=total_bytes)
    if run.fp8:
        weight = H * F if run.fp8_copies == 1 else 0  # for dgrad, before the weight gradient's operand
        backward.append(Held("mlp", "mlp.fc2", "transposed operand", max(T * F, weight)))
    if not run.fuse_wgrad:
        backward.append(Held("mlp", "mlp.fc2", "weight gradient before it is added", H * F * e))
    stream = Held("mlp", "mlp", "gradient of the residual stream", 2 * run.rows * H * e)
    backward.append(stream)
    if run.sequence:
        backward.append(Held("mlp", "mlp.fc1", "gathered input, unscattered gradient", 2 * T * H * e))
    if again:
        forward.append(stream)
        draws.append(stream)
    return tuple(max(forward, draws, backward, key=total_bytes))


def attention_workspace(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """Needed on top of the saved layers, the last MLP not counted, while the last attention runs."""
    if run.recompute.drops("core_attn"):
        outside = run.tokens * (2 * shape.q_size + 2 * shape.kv_size) * run.item
        held = Held("attention", "attention.core", "gradients of output, q, k, v outside", outside)
        return (*attention_workspace(shape, replace(run, recompute=NOTHING)), held)
    run = replace(run, recompute=NOTHING)
    T, q, kv, e, w = run.tokens, shape.q_size, shape.kv_size, run.item, run.wide
    if run.attention != "unfused":
        repeated = 2 * q if run.device == "cuda" and kv < q and run.attention != "local" else 0
        gradients = T * (2 * q + 2 * kv + repeated) * e
        if run.attention == "local":
            statistics = T * shape.num_heads * 2 * ITEM_BYTES["fp32"]
            return (
                Held("attention", "attention.core", "gradients of output, q, k, v", gradients),
                Held("attention", "attention.core", "row sums", statistics),
            )
        return (
            Held("attention", "attention.core", "gradients of output, q, k, v", gradients),
            Held("attention", "attention.core", "accumulator of q's gradient", T * q * w),
        )
    P = run.micro_batch_size * shape.num_heads * run.seq_length**2
    if "masked_softmax" in run.fused:
        return (_fused_softmax_workspace(shape, run, P),)
    rounded = e if w > e else 0  # probabilities in the compute dtype, beside those of the softmax
    cleared = w if run.segments else 0  # and those of rows that see no key
    forward = P * (2 * w + rounded + cleared)
    backward = P * w * (4 if run.device == "cuda" else 3)  # CUDA's softmax makes a product of its own
    drawing = 0
    if shape.attention_dropout:
        drawing = P * (w + (rounded or cleared)) + _mask_drawing(P // run.micro_batch_size, run)
    saved = [held.num_bytes for held in _attention(shape, run) if held.what in ("softmax", "probabilities")]
    elsewhere = sum(saved) + T * q * e  # counted as saved; proj's input is not made yet, or gone already
    return (Held("attention", "attention.core", "scores", max(forward, drawing, backward) - elsewhere),)


def _fused_softmax_workspace(shape: ModelShape, run: MicrobatchShape, P: int) -> Held:
    """Scores beside their probabilities forward; backward the gradients of both."""
    forward, backward = 2 * P * run.item, 3 * P * run.item
    drawing = 0
    if shape.attention_dropout:
        drawing = P * run.item + _mask_drawing(P // run.micro_batch_size, run)
    saved = [held.num_bytes for held in _attention(shape, run) if "probabilities" in held.what]
    elsewhere = sum(saved) + run.tokens * shape.q_size * run.item
    return Held("attention", "attention.core", "scores", max(forward, drawing, backward) - elsewhere)


def _mask_drawing(elements: int, run: MicrobatchShape) -> int:
    """64-bit words alive at once while masks of `elements` a sample are drawn, one word for four elements.

    Of the 13 words ten depend on the sample, three only on the place in it.
    """
    return elements * INT64 // 4 * (10 * run.micro_batch_size + 3)


def _norm(
    shape: ModelShape,
    run: MicrobatchShape,
    part: Literal["attention", "mlp", "head"],
    site: str,
    rows: int,
    size: int,
    affine: bool = True,
    fused: bool = False,
) -> Iterator[Held]:
    """A norm keeps its input, the plain one in the wide dtype (in fp32 the residual stream itself)."""
    layer_norm = shape.normalization == "LayerNorm" and affine
    statistics = 2 if layer_norm else 1
    if fused:
        yield Held(part, site, "input", rows * size * run.item)
        yield Held(part, site, "statistics", rows * FP32 * statistics)
        return
    yield Held(part, site, "wide input", rows * size * run.wide)
    yield Held(part, site, "statistics", rows * run.wide * statistics)
    if run.device == "cpu" and not layer_norm and affine:  # composed of single operators there
        yield Held(part, site, "normalised input", rows * size * run.wide)


def _attention(shape: ModelShape, run: MicrobatchShape) -> Iterator[Held]:
    """q, k, v and what the backend keeps. Views of the merged projection keep all of it alive."""
    T, q, kv, e = run.tokens, shape.q_size, shape.kv_size, run.item
    N, G, S = shape.num_heads, shape.num_groups, run.seq_length
    normed, fused_norm = shape.qk_norm != "none", "qk_norm" in run.fused
    in_place = "rope" in run.fused and not normed
    turned = normed or (shape.position == "rope" and not in_place)  # q and k are then tensors of their own
    if normed and not fused_norm:
        affine = shape.qk_norm == "norm"
        for what, heads in (("q_norm", N), ("k_norm", G)):
            for held in _norm(
                shape, run, "attention", f"attention.{what}", T * heads, shape.head_dim, affine
            ):
                if held.what != "wide input" or run.wide > e:  # else a view of the projection
                    yield held
    recomputed = run.recompute.drops("core_attn")  # then q, k and v as they are, and nothing behind them
    unfused = run.attention == "unfused" and not recomputed
    views = run.micro_batch_size == 1 or G == 1  # then PyTorch's einsum takes k and v without copying
    whole = not unfused or views or (normed and (fused_norm or run.wide == e))
    if whole:
        yield Held("attention", "attention.core", "q, k, v projection", T * (q + 2 * kv) * e)
    if turned:
        yield Held("attention", "attention.core", "q", T * q * e)
        yield Held("attention", "attention.core", "k", T * kv * e)
    elif unfused and (N > G or not views):
        yield Held("attention", "attention.core", "q", T * q * e)
    if unfused and not views:
        yield Held("attention", "attention.core", "v", T * kv * e)
        if not turned:
            yield Held("attention", "attention.core", "k", T * kv * e)
    if recomputed:
        return
    if not unfused:
        yield Held("attention", "attention.core", "log-sum-exp", T * N * ITEM_BYTES["fp32"])
        if run.fp8:  # else it is the input of proj
            yield Held("attention", "attention.core", "output", T * q * e)
        return
    P = run.micro_batch_size * N * S * S
    if "masked_softmax" in run.fused:
        yield Held("attention", "attention.core", "probabilities", P * e)
        if shape.attention_dropout:
            yield Held("attention", "attention.core", "probabilities after dropout", P * e)
            yield Held("attention", "attention.core", "dropout mask", P * BOOL)
        return
    if shape.softcap:
        yield Held("attention", "attention.core", "capped scores", P * run.wide)
    sinks = shape.softmax_type != "vanilla"  # one more column
    yield Held("attention", "attention.core", "softmax", (P // S) * (S + sinks) * run.wide)
    if run.wide > e or run.segments or shape.attention_dropout:  # else they are the softmax itself
        yield Held("attention", "attention.core", "probabilities", P * e)
    masks = run.micro_batch_size if run.segments else 1
    yield Held("attention", "attention.core", "hidden keys", masks * S * S * BOOL)
    if shape.attention_dropout:
        yield Held("attention", "attention.core", "dropout mask", P * BOOL)


def _activation(shape: ModelShape, run: MicrobatchShape) -> Iterator[Held]:
    """Between fc1 and fc2: the input of each nonlinear step."""
    size = run.tokens * run.item
    if shape.activation == "squared-relu" and "activation" not in run.fused:
        yield Held("mlp", "mlp.activation", "relu", size * shape.ffn)
        return
    yield Held("mlp", "mlp.fc1", "output", size * shape.fc1_size)
    if "activation" in run.fused:
        return
    if shape.gated:
        yield Held("mlp", "mlp.activation", "gate after its curve", size * shape.ffn)
    if shape.activation == "quick-geglu":
        yield Held("mlp", "mlp.activation", "sigmoid", size * shape.ffn)
