"""[model]: the shape of the transformer."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import ATTENTION_VARIANTS, HALF_LOSS, NUMERICS, POSITIONS

ROPE = {"position_embedding_type": "rope"}
GATE = {"activation_func": ("swiglu", "geglu", "quick-geglu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """The model as the user states it; defaults that depend on each other are resolved in formulas/."""

    title: ClassVar[str] = "Model"

    preset: str | None = flag(
        None,
        short=True,
        own=True,
        metavar="NAME",
        other="gpt2-124m",
        help="A known model, such as gpt2-124m, llama3.2-1b or qwen3-8b (all in docs/options.md): its shape "
        "and sequence length. Every other option overrides it.",
    )
    num_layers: int = flag(
        6,
        short=True,
        at_least=1,
        megatron="required",
        help="Transformer layers. Stated with the next two, or by --preset.",
    )
    hidden_size: int = flag(
        192, short=True, at_least=1, other=384, megatron="required", help="Width of the residual stream."
    )
    num_attention_heads: int = flag(
        6, short=True, at_least=1, other=3, megatron="required", help="Query heads of a layer."
    )
    ffn_hidden_size: int | None = flag(
        None,
        short=True,
        at_least=1,
        other=320,
        help="Width of the MLP; unset: 4 x hidden, or with --swiglu 8/3 x hidden cut to a multiple of 64.",
    )
    kv_channels: int | None = flag(
        None, at_least=1, other=64, help="Channels of a head; unset: hidden_size / num_attention_heads."
    )
    group_query_attention: bool = flag(
        False, short=True, help="Share each key and value head among several query heads (GQA)."
    )
    num_query_groups: int | None = flag(
        None,
        short=True,
        at_least=1,
        other=2,
        megatron=1,
        needs={"group_query_attention": True},
        help="Key and value heads under --group-query-attention; 1 is multi-query attention.",
    )
    max_position_embeddings: int | None = flag(
        None,
        at_least=1,
        other=2048,
        megatron="required",
        help="Longest sequence the model is meant for, rows of learned positions; unset: --seq-length.",
    )
    vocab_size: int | None = flag(
        None, at_least=2, other=1000, help="Tokens in the vocabulary; unset: the tokenizer's."
    )
    pad_vocab_size: bool = flag(
        True, help="Pad the stored vocabulary matrices; padding never enters softmax or loss."
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        at_least=1,
        other=96,
        needs={"pad_vocab_size": True},
        help="Multiple to which the stored vocabulary is padded.",
    )
    padded_vocab_size: int | None = flag(
        None,
        at_least=2,
        other=65536,
        needs={"pad_vocab_size": True},
        help="Rows of the stored vocabulary matrices, in place of the multiple.",
    )
    activation_func: Literal["gelu-tanh", "gelu", "squared-relu", "quick-geglu", "geglu", "swiglu"] = flag(
        "gelu-tanh",
        short=True,
        own=True,
        shorthands={
            "--swiglu": "swiglu",
            "--geglu": "geglu",
            "--quick-geglu": "quick-geglu",
            "--squared-relu": "squared-relu",
            "--gelu-exact": "gelu",
        },
        help="The MLP's activation; gelu is the exact one, gelu-tanh its approximation.",
    )
    activation_func_clamp_value: float | None = flag(
        None,
        more_than=0,
        other=0.01,
        needs=GATE,
        help="Limit of a gated activation's input: the gate from above, the other half on both sides.",
    )
    glu_linear_offset: float = flag(
        0.0, needs=GATE, help="Added to the half that the gate multiplies: gpt-oss has 1, and a limit of 7."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", short=True, help="Kind of every norm.")
    norm_epsilon: float = flag(
        1e-5,
        more_than=0,
        other=1e-6,
        aliases=("--layernorm-epsilon",),
        help="Added to the variance inside a norm.",
    )
    apply_layernorm_1p: bool = flag(False, help="Zero-centred gamma: norms store gamma - 1.")
    position_embedding_type: Literal["learned_absolute", "rope", "none", "yarn", "mrope", "relative"] = flag(
        "learned_absolute",
        short=True,
        shorthands={"--use-rotary-position-embeddings": "rope"},
        refused={"yarn": POSITIONS, "mrope": POSITIONS, "relative": POSITIONS},
        help="How the model knows positions.",
    )
    rotary_base: float = flag(10000.0, more_than=0, needs=ROPE, help="Base of the rotary frequencies.")
    rotary_percent: float = flag(
        1.0, more_than=0, at_most=1, needs=ROPE, help="Share of a head's channels that rotate."
    )
    rotary_interleaved: bool = flag(
        False, needs=ROPE, help="Rotate neighbouring channels rather than the two halves."
    )
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, at_least=1, needs=ROPE, waits_for=POSITIONS, help="Divide positions by this factor."
    )
    use_rope_scaling: bool = flag(False, needs=ROPE, help="Llama-3 scaling of the rotary frequencies.")
    rope_scaling_factor: float = flag(
        8.0,
        at_least=1,
        needs={"use_rope_scaling": True},
        help="Factor by which long wavelengths are stretched.",
    )
    untie_embeddings_and_output_weights: bool = flag(False, help="Give the output head a matrix of its own.")
    add_bias_linear: bool = flag(True, aliases=("--bias-linear",), help="Biases in every linear layer.")
    add_qkv_bias: bool = flag(
        False, needs={"add_bias_linear": False}, help="Biases in the query, key and value projection alone."
    )
    qk_layernorm: bool = flag(
        False, excludes="qk-norm", help="Normalize queries and keys over a head's channels."
    )
    qk_l2_norm: bool = flag(
        False, excludes="qk-norm", help="Scale queries and keys to unit root mean square."
    )
    hidden_dropout: float = flag(
        0.1,
        at_least=0,
        less_than=1,
        help="Dropout after embedding, attention and MLP; applied in steps of 1/65536, above 0 at least one.",
    )
    attention_dropout: float = flag(0.1, at_least=0, less_than=1, help="Dropout of attention probabilities.")
    init_method_std: float = flag(
        0.02,
        more_than=0,
        other=0.01,
        help="Standard deviation of initial weights; outputs of a block / sqrt(2 layers).",
    )
    embedding_init_method_std: float | None = flag(
        None, more_than=0, other=0.1, help="The same for the embeddings; unset: --init-method-std."
    )
    softmax_scale: float | None = flag(
        None, more_than=0, other=0.5, help="Factor on attention scores; unset: 1 / sqrt(channels of a head)."
    )
    apply_query_key_layer_scaling: bool = flag(
        False, waits_for=NUMERICS, help="Divide scores by the layer's number inside the softmax."
    )
    fp16_lm_cross_entropy: bool = flag(False, waits_for=HALF_LOSS, help="Compute the loss in half precision.")
    multi_latent_attention: bool = flag(
        False, waits_for=ATTENTION_VARIANTS, help="Multi-head latent attention (MLA)."
    )
    attention_output_gate: bool = flag(False, waits_for=ATTENTION_VARIANTS, help="Gate attention's output.")
    window_size: tuple[int, int] | None = flag(
        None,
        at_least=-1,
        other=(128, 0),
        help="Sliding window: how many tokens before itself a token sees, and after: 0, as it must.",
    )
    attn_logit_softcapping: float = flag(
        0.0,
        at_least=0,
        own=True,
        other=0.5,
        help="Attention scores x become c tanh(x / c), as in Gemma 2 (c = 50); 0: they stay.",
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag(
        "vanilla",
        help="Attention sinks: one more score a head in the softmax's sum, with no value; 0 (off-by-one), or "
        "learnable. vanilla has none.",
    )


# Stated together, unless a preset or a checkpoint gives them.
REQUIRED_FIELDS = ("num_layers", "hidden_size", "num_attention_heads")
# Everything that --use-checkpoint-args takes from a checkpoint.
SHAPE_FIELDS = tuple(f.name for f in fields(ModelConfig) if f.name != "preset")
