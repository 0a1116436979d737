"""From what the user said of a model to the numbers that define it, every default filled in."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeVar

from redline.errors import ConfigError
from redline.formulas.shape import ModelShape, PositionEmbedding, QKNorm, RopeScaling
from redline.units import round_up

if TYPE_CHECKING:
    from redline.config import ModelConfig, MoeConfig, MtpConfig

T = TypeVar("T")

# Kinds that only count like one of ours: training refuses them, a foreign launch script may hold them.
POSITIONS: dict[str, PositionEmbedding] = {
    "learned_absolute": "learned_absolute",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "relative": "none",
    "none": "none",
}


def shape_of(
    model: ModelConfig,
    seq_length: int,
    vocab_size: int,
    tp: int = 1,
    *,
    moe: MoeConfig | None = None,
    mtp: MtpConfig | None = None,
) -> ModelShape:
    """The model with every default resolved.

    Args:
        seq_length: learned positions reach this far unless --max-position-embeddings says more.
        vocab_size: the tokenizer's true size.
        tp: tensor-parallel ranks, which the stored vocabulary is padded for.
        moe, mtp: None means a dense model without prediction heads.

    Raises: ConfigError when the numbers make no model.
    """
    num_experts = (moe.num_experts or 0) if moe else 0
    ffn = ffn_size(model)
    return ModelShape(
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=ffn,
        num_heads=model.num_attention_heads,
        num_groups=_groups(model),
        head_dim=_head_dim(model),
        vocab_size=vocab_size,
        padded_vocab_size=_padded_vocab(model, vocab_size, tp),
        max_positions=_max_positions(model, seq_length),
        activation=model.activation_func,
        activation_clamp=model.activation_func_clamp_value,
        glu_offset=model.glu_linear_offset,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        zero_centered_gamma=model.apply_layernorm_1p,
        position=POSITIONS[model.position_embedding_type],
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rotary_interleaved=model.rotary_interleaved,
        rope_scaling=RopeScaling(factor=model.rope_scaling_factor) if model.use_rope_scaling else None,
        bias_linear=model.add_bias_linear,
        bias_qkv=model.add_bias_linear or model.add_qkv_bias,
        qk_norm=_qk_norm(model),
        tied=not model.untie_embeddings_and_output_weights,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        softmax_scale=model.softmax_scale,
        window=model.window_size,
        softcap=model.attn_logit_softcapping,
        softmax_type=model.softmax_type,
        init_std=model.init_method_std,
        embedding_init_std=_or(model.embedding_init_method_std, model.init_method_std),
        num_experts=num_experts,
        moe_ffn=(moe.moe_ffn_hidden_size or ffn) if moe and num_experts else 0,
        moe_topk=moe.moe_router_topk if moe else 2,
        moe_shared_ffn=(moe.moe_shared_expert_intermediate_size or 0) if moe and num_experts else 0,
        moe_layer_pattern=layer_pattern(moe.moe_layer_freq, model.num_layers) if moe and num_experts else (),
        mtp_num_layers=(mtp.mtp_num_layers or 0) if mtp else 0,
    )


def ffn_size(model: ModelConfig) -> int:
    """--ffn-hidden-size, or Megatron's default: 4h, with SwiGLU 8h/3 cut to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    hidden = model.hidden_size
    if model.activation_func != "swiglu":
        return 4 * hidden
    ffn = int(4 * hidden * 2 / 3) // 64 * 64
    if ffn == 0:
        raise ConfigError(
            f"--swiglu with --hidden-size {hidden} leaves no default MLP width.",
            why="the default is 8/3 of the hidden size, cut to a multiple of 64, which is 0 here.",
            mend="give --ffn-hidden-size.",
        )
    return ffn


def padded_vocab_size(vocab_size: int, divisor: int, tp: int = 1) -> int:
    """`vocab_size` rounded up to a multiple of divisor * tp (50257, 128, tp 1 -> 50304)."""
    unit = divisor * tp
    return round_up(vocab_size, unit)


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from --moe-layer-freq: "2" (layers 0, 2, 4, ...) or "([0]*3+[1]*58)".

    Raises: ConfigError when it is neither, or names another number of layers.
    """
    try:
        value = _pattern_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        value = 0
    if isinstance(value, int) and value > 0:
        return tuple(layer % value == 0 for layer in range(num_layers))
    if isinstance(value, list) and len(value) == num_layers and set(value) <= {0, 1}:
        return tuple(bool(item) for item in value)
    raise ConfigError(
        f'--moe-layer-freq "{text}" does not say which of {num_layers} layers have experts.',
        why="it is a number N (every N-th layer), or a list of a 0 or 1 a layer.",
        mend='write for example "1", or "([0]*1+[1]*26)" for 27 layers.',
    )


def _pattern_value(node: ast.expr) -> int | list[int]:
    """An int, a list of ints, and sums and products of these; nothing else is evaluated."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=items):
            values = [_pattern_value(item) for item in items]
            return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _pattern_value(left), _pattern_value(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _pattern_value(left), _pattern_value(right)
            if isinstance(one, list) and isinstance(other, int) and len(one) * other <= 100_000:
                return one * other
    raise ValueError(ast.dump(node))


def _groups(model: ModelConfig) -> int:
    heads = model.num_attention_heads
    if not model.group_query_attention:
        return heads
    groups = _or(model.num_query_groups, 1)
    if heads % groups:
        raise ConfigError(
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}.",
            why="every group of keys and values serves the same number of query heads.",
            mend="choose a number of groups that divides the number of heads.",
        )
    return groups


def _head_dim(model: ModelConfig) -> int:
    if model.kv_channels is not None:
        return model.kv_channels
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{model.num_attention_heads}.",
            why="without --kv-channels a head has hidden size / heads channels.",
            mend="choose sizes that divide, or give --kv-channels.",
        )
    return model.hidden_size // model.num_attention_heads


def _padded_vocab(model: ModelConfig, vocab_size: int, tp: int) -> int:
    if not model.pad_vocab_size:
        return vocab_size
    if model.padded_vocab_size is None:
        return padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tp)
    if model.padded_vocab_size < vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {model.padded_vocab_size} is less than the {vocab_size} tokens there are.",
            why="every token needs a row of the embedding.",
            mend=f"use {vocab_size} or more, or leave it out.",
        )
    return model.padded_vocab_size


def _max_positions(model: ModelConfig, seq_length: int) -> int:
    longest = _or(model.max_position_embeddings, seq_length)
    if longest < seq_length:
        raise ConfigError(
            f"--max-position-embeddings {longest} is less than --seq-length {seq_length}.",
            why="the model would meet positions it is not meant for.",
            mend="raise --max-position-embeddings, or leave it out.",
        )
    return longest


def _qk_norm(model: ModelConfig) -> QKNorm:
    if model.qk_layernorm:
        return "norm"
    return "l2" if model.qk_l2_norm else "none"


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
