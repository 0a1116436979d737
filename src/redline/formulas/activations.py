"""What one microbatch keeps for backward: a table, one line a tensor. workspace.py has what it needs on top.

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

BOOL, INT64, FP32 = 1, 8, 4
COLUMNS, ROWS = ("attention.qkv", "mlp.fc1"), ("attention.proj", "mlp.fc2")  # GEMMs, by how tp cuts them
GEMMS = COLUMNS + ROWS
Joined = Literal["", "pushed", "symmetric", "auto"]


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
        joined: what joins tp's collectives to GEMMs by memory that peers write: "auto" either, "" neither.
        z_loss: the loss has a part of the log-partition; only the plain one keeps more for it.
        fp8: GEMMs of the layers keep their input in fp8, those that run in it.
        fp8_weights: elements of the layers' weights that GEMMs read in fp8.
        fp8_copies: casts of each that are kept: none, rows, or transposed too; others are made each time.
        fp8_stored: those weights exist in fp8 alone, which is one of these copies.
        fp8_head: elements of the head, where it runs in fp8; it is kept in both layouts.
        fp8_blocks: with a scale for each block.
        fp8_measures: operands are measured before each cast.
        fp8_sites: names of those GEMMs, such as "layers.0.attention.qkv"; none: every one.
        fp8_parts: which GEMMs are among them in the layer that is looked at, see `of_layer`.
        fp8_linked: tensor-parallel ranks send rows of their operands in fp8 (`--tp-comm-overlap`).
        accumulates: the step has several microbatches, whose weight gradients add up.
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
    joined: Joined = ""
    offload_layers: int = 0
    z_loss: bool = False
    fp8: bool = False
    fp8_weights: int = 0
    fp8_copies: int = 2
    fp8_stored: bool = False
    fp8_head: int = 0
    fp8_blocks: bool = False
    fp8_measures: bool = False
    fp8_sites: frozenset[str] = frozenset()
    fp8_parts: frozenset[str] = frozenset(GEMMS)
    fp8_linked: bool = False
    accumulates: bool = False

    def parts_in_fp8(self, layer: int) -> frozenset[str]:
        """The GEMMs of a layer that keep their input in fp8; sizes or options hold others in bf16."""
        if not self.fp8 or not self.fp8_sites:
            return self.fp8_parts
        return frozenset(part for part in GEMMS if f"layers.{layer}.{part}" in self.fp8_sites)

    def of_layer(self, layer: int) -> MicrobatchShape:
        """As this layer runs it."""
        return replace(self, fp8_parts=self.parts_in_fp8(layer))

    def in_fp8(self, gemm: str) -> bool:
        """Whether one of GEMMS keeps its input in fp8."""
        return self.fp8 and gemm in self.fp8_parts

    def operand(self, gemm: str) -> int:
        """Bytes of an element of the input that one of GEMMS keeps."""
        whole = gemm == "attention.proj" and self.keeps_attention_output  # kept once, and cast again
        return 1 if self.in_fp8(gemm) and not whole else self.item

    @property
    def keeps_attention_output(self) -> bool:
        """Whether attention keeps its output for its own backward."""
        return self.attention != "unfused" and not self.recompute.drops("core_attn")

    @property
    def fp8_mlp(self) -> bool:
        """Whether norm, fc1, activation and fc2 of an MLP in fp8 are one Function."""
        both = self.in_fp8("mlp.fc1") and self.in_fp8("mlp.fc2")
        return both and {"norm", "activation"} <= self.fused and self.tp == 1 and not self.fp8_blocks

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
    """What one layer keeps for backward, if it is in no unit of full recompute; `run` as that layer's."""
    kept = list(_made_by_layer(shape, run))
    for module, gone, instead in _dropped(shape, run):
        if run.recompute.drops(module):
            kept = [each for each in kept if not _among(each, gone.split())]
            kept += [] if instead is None else [instead]
    return tuple(kept)


def saved_in_layers(shape: ModelShape, run: MicrobatchShape, layers: Iterable[int]) -> list[tuple[Held, ...]]:
    """`saved_by_layer` of each of these layers."""
    found: dict[frozenset[str], tuple[Held, ...]] = {}
    kept = []
    for layer in layers:
        parts = run.parts_in_fp8(layer)
        if parts not in found:
            found[parts] = saved_by_layer(shape, run.of_layer(layer))
        kept.append(found[parts])
    return kept


def _dropped(shape: ModelShape, run: MicrobatchShape) -> Iterator[tuple[Module, str, Held | None]]:
    """(module, what it drops, what it keeps in place of that). In fp8 only a GEMM's operand is dropped."""
    stream, curve = run.rows * shape.hidden * run.item, run.tokens * shape.fc1_size * run.item
    before: tuple[tuple[Literal["attention", "mlp"], str], ...]
    before = ("attention", "attention.qkv"), ("mlp", "mlp.fc1")
    for part, gemm in before:
        if run.in_fp8(gemm):
            yield "layernorm", f"{gemm}:input", None
        else:
            yield "layernorm", f"{part}.norm {gemm}:input", Held(part, f"{part}.norm", "input", stream)
    if run.in_fp8("mlp.fc2"):
        yield "activation", "mlp.fc2", None
    else:
        output = Held("mlp", "mlp.fc1", "output", curve)
        yield "activation", "mlp.activation mlp.fc1:output mlp.fc2", output
    yield "mlp", "mlp", Held("mlp", "mlp", "input", stream)


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
        kept = set(attention_tensors(shape, run))
        again += [held for held in attention_tensors(shape, plain) if held not in kept]
        if run.in_fp8("attention.proj") and plain.keeps_attention_output:
            size = run.tokens * shape.q_size * run.item
            again.append(Held("attention", "attention.core", "output", size))
    if run.recompute.drops("mlp"):
        again += [held for held in _made_by_layer(shape, plain) if held.part == "mlp"]
        again.append(Held("mlp", "mlp", "input, kept once", -shared_stream(shape, run)))
        return tuple(again)
    if run.recompute.drops("layernorm") and run.in_fp8("mlp.fc1"):
        again.append(Held("mlp", "mlp.fc1", "input", run.tokens * shape.hidden))
    if run.recompute.drops("activation"):
        again.append(Held("mlp", "mlp.fc2", "input", run.tokens * shape.ffn * run.operand("mlp.fc2")))
        if not run.in_fp8("mlp.fc2"):
            again += between_gemms(shape, plain)
            once = run.tokens * shape.fc1_size * run.item
            again.append(Held("mlp", "mlp.fc1", "output, kept once", -once))
    return tuple(again)


def shared_stream(shape: ModelShape, run: MicrobatchShape) -> int:
    """Bytes of the residual stream where a norm keeps it as it is, and not a wide copy."""
    itself = "norm" in run.fused or run.wide == run.item
    return run.rows * shape.hidden * run.item if itself else 0


def _made_by_layer(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """Everything a layer would keep."""
    T, R = run.tokens, run.rows

    def multiplied(part: Literal["attention", "mlp"], gemm: str, size: int) -> Held:
        """A GEMM in fp8 keeps what it multiplied, not its own rows of it, unless these travel in fp8."""
        rows = T if gemm in ROWS or (run.in_fp8(gemm) and not run.fp8_linked) else R
        return Held(part, gemm, "input", rows * size * run.operand(gemm))

    saved = [
        *_norm(shape, run, "attention", "attention.norm", R, shape.hidden, fused="norm" in run.fused),
        multiplied("attention", "attention.qkv", shape.hidden),
        *attention_tensors(shape, run),
        multiplied("attention", "attention.proj", shape.q_size),
        *_norm(shape, run, "mlp", "mlp.norm", R, shape.hidden, fused="norm" in run.fused),
        multiplied("mlp", "mlp.fc1", shape.hidden),
        *between_gemms(shape, run),
        multiplied("mlp", "mlp.fc2", shape.ffn),
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


def attention_tensors(shape: ModelShape, run: MicrobatchShape) -> Iterator[Held]:
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
        return  # its output is the input of proj
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


def between_gemms(shape: ModelShape, run: MicrobatchShape) -> Iterator[Held]:
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
    if shape.activation_clamp is not None:
        yield Held("mlp", "mlp.activation", "gate and up within the limit", 2 * size * shape.ffn)
    elif shape.glu_offset:
        yield Held("mlp", "mlp.activation", "up with its offset", size * shape.ffn)
