"""What a microbatch needs for a moment, on top of all that is saved: in the loss, an MLP, an attention.

Like activations.py a table, one line a tensor; of several moments of a part the one that needs most. What is
saved and freed before the moment is taken off by a line with negative bytes.
"""

from __future__ import annotations

from dataclasses import replace

from redline.formulas.activations import (
    FP32,
    INT64,
    Held,
    MicrobatchShape,
    attention_tensors,
    between_gemms,
    total_bytes,
)
from redline.formulas.loss_chunks import logit_columns, loss_chunk_tokens
from redline.formulas.recompute import NOTHING
from redline.formulas.shape import ModelShape
from redline.formulas.state import ITEM_BYTES
from redline.rng import ATTENTION_LANES, HIDDEN_LANES, Lanes


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
        cast = Held("head", "loss", "gradient of the logits in fp8", T * padded * bool(run.fp8_head))
        return tuple(max([caller], [dhidden, widened], [dhidden, cast], key=total_bytes))
    forward = [caller, Held("head", "loss", "logits, padded", T * padded * e)]
    if w > e or padded > V:  # the softmax reads a dense copy without the padding
        forward.append(Held("head", "loss", "wide logits", T * V * w))
    backward = [
        caller,
        Held("head", "loss", "gradient of the log probabilities", T * V * w),
        Held("head", "loss", "gradient of the logits", T * V * w),
    ]
    return tuple(max(forward, backward, key=total_bytes))


def _chunk_workspace(shape: ModelShape, run: MicrobatchShape) -> tuple[Held, ...]:
    """While the loss without logits walks its chunks, beside the gradients that it leaves."""
    T, H, e = run.tokens, shape.hidden, run.item
    rows = min(loss_chunk_tokens(T, shape.vocab_size, e), T)
    columns = logit_columns(shape.vocab_size)
    held = [
        Held("head", "loss", "hidden states that count", T * H * e),
        Held("head", "loss", "logits of a chunk", rows * columns * e),
    ]
    if run.fp8_head:
        held.append(Held("head", "loss", "gradient of the logits in fp8", rows * columns))
    if run.copies_for_wgrad:
        wide = rows * (columns + H) * ITEM_BYTES[run.grad_dtype]
        held.append(Held("head", "head", "wide operands of the weight gradient", wide))
    if not run.fuse_wgrad and rows < T:
        held.append(Held("head", "head", "weight gradient over chunks", shape.padded_vocab_size * H * FP32))
    return tuple(held)


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
    if shape.bias_linear and plain and w > e:  # then what the activation will keep does not exist yet
        later = total_bytes(between_gemms(shape, run)) - T * shape.fc1_size * e + T * F * e
        forward.append(Held("mlp", "mlp.fc1", "wide output with its bias", T * shape.fc1_size * w - later))
    stream = Held("mlp", "mlp", "gradient of the residual stream", 2 * run.rows * H * e)
    backward = _fp8_mlp_backward(shape, run) if run.fp8_mlp else [*_mlp_backward(shape, run), stream]
    if shape.hidden_dropout and "bias_dropout_add" not in run.fused:
        drawing = _mask_drawing(run.seq_length * H, HIDDEN_LANES, run)
        draws.append(Held("mlp", "mlp.dropout", "mask drawing", drawing))
        # Beside that of the stream, which a nested backward counts once more.
        dropped = (1 if again else 2) * run.rows * H * e
        backward.append(Held("mlp", "mlp.dropout", "gradients before and behind the factor", dropped))
    if again:
        forward.append(stream)
        draws.append(stream)
    return tuple(max(forward, draws, backward, key=total_bytes))


def _mlp_backward(shape: ModelShape, run: MicrobatchShape) -> list[Held]:
    """Beside the gradient of the stream, where every site is a Function of its own."""
    T, H, F, F1, e = run.tokens, shape.hidden, shape.ffn, shape.fc1_size, run.item
    plain = "activation" not in run.fused
    through_activation = 2 if shape.gated else 3 if shape.activation == "squared-relu" and plain else 1
    backward = [Held("mlp", "mlp.fc2", "gradients through the activation", through_activation * T * F * e)]
    if run.copies_for_wgrad and not run.in_fp8("mlp.fc2"):
        grad = ITEM_BYTES[run.grad_dtype]
        widened = [
            Held("mlp", "mlp.fc2", "gradient of the input", T * F * e),
            Held("mlp", "mlp.fc2", "wide operands of the weight gradient", T * (F + H) * grad),
        ]
        freed = total_bytes(between_gemms(shape, run)) + T * F * e  # by then; the rest as for fc2
        product = [
            Held("mlp", "mlp.fc1", "gradient of the output", T * F1 * e - freed),
            Held("mlp", "mlp.fc1", "wide operands of the weight gradient", T * (F1 + H) * grad),
        ]
        backward = max(backward, widened, [] if run.in_fp8("mlp.fc1") else product, key=total_bytes)
    if run.in_fp8("mlp.fc2"):
        backward.append(_fp8_operand(T * F, H * F, run))
    elif not run.fuse_wgrad:
        backward.append(Held("mlp", "mlp.fc2", "weight gradient before it is added", H * F * e))
    if run.sequence:
        gathered = T * H * (1 if run.fp8_linked and run.in_fp8("mlp.fc1") else e)
        backward.append(Held("mlp", "mlp.fc1", "gathered input, unscattered gradient", gathered + T * H * e))
    return backward


def _fp8_mlp_backward(shape: ModelShape, run: MicrobatchShape) -> list[Held]:
    """The MLP as one Function, which drops what it saved once it has read it; of its steps the fullest."""
    T, H, F, F1, e = run.tokens, shape.hidden, shape.ffn, shape.fc1_size, run.item
    operand = Held("mlp", "mlp.fc2", "input, dropped", -T * F)
    layouts = Held("mlp", "mlp.fc1", "gradient of the output in fp8, both layouts", 2 * T * F1)
    fc2 = [
        Held("mlp", "mlp.fc2", "gradient of the output in fp8, both layouts", 2 * T * H),
        _fp8_products(T * F, H * F, run),
    ]
    activation = [Held("mlp", "mlp.activation", "gradient of the output", T * F * e), operand, layouts]
    output = Held("mlp", "mlp.activation", "output of fc1, dropped", -T * F1 * e)
    fc1 = [operand, output, layouts, _fp8_products(T * H, F1 * H, run)]
    stream = Held("mlp", "mlp", "gradient of the residual stream", run.rows * H * e)
    return [*max(fc2, activation, fc1, key=total_bytes), stream]


def _fp8_products(size: int, weight: int, run: MicrobatchShape) -> Held:
    """Beside the weight gradient first, then beside that of the input of `size` elements."""
    first = _fp8_operand(size, weight, run).num_bytes
    turned = weight if run.fp8_copies < 2 else 0
    return Held("mlp", "mlp", "transposed operand, product in fp8", max(first, turned + size * run.item))


def _fp8_operand(size: int, weight: int, run: MicrobatchShape) -> Held:
    """For a weight gradient its input transposed, and the product: no GEMM in fp8 adds to what is there.

    For the gradient of the input the weight transposed, where that is made each time.
    """
    product = weight * ITEM_BYTES[run.grad_dtype] if run.accumulates else 0
    again = weight if run.fp8_copies < 2 else 0
    return Held("mlp", "mlp", "transposed operand, product in fp8", max(size + product, again))


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
        words = _mask_drawing(P // run.micro_batch_size, ATTENTION_LANES, run)
        drawing = P * (w + (rounded or cleared)) + words
    saved = [
        held.num_bytes for held in attention_tensors(shape, run) if held.what in ("softmax", "probabilities")
    ]
    elsewhere = sum(saved) + T * q * e  # counted as saved; proj's input is not made yet, or gone already
    return (Held("attention", "attention.core", "scores", max(forward, drawing, backward) - elsewhere),)


def _fused_softmax_workspace(shape: ModelShape, run: MicrobatchShape, P: int) -> Held:
    """Scores beside their probabilities forward; backward the gradients of both."""
    forward, backward = 2 * P * run.item, 3 * P * run.item
    drawing = 0
    if shape.attention_dropout:
        drawing = P * run.item + _mask_drawing(P // run.micro_batch_size, ATTENTION_LANES, run)
    saved = [held.num_bytes for held in attention_tensors(shape, run) if "probabilities" in held.what]
    elsewhere = sum(saved) + run.tokens * shape.q_size * run.item
    return Held("attention", "attention.core", "scores", max(forward, drawing, backward) - elsewhere)


def _mask_drawing(elements: int, lanes: Lanes, run: MicrobatchShape) -> int:
    """Bytes of the 64-bit words alive at once while masks of `elements` a sample are drawn, 13 a block.

    Ten of them depend on the sample, three only on the place in it.
    """
    return elements * INT64 // lanes.in_block * (10 * run.micro_batch_size + 3)
