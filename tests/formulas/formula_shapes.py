"""Published models, and random ones, as shapes."""

from dataclasses import replace

from hypothesis import strategies as st

from redline.formulas.shape import ModelShape


def gpt(num_layers, hidden, num_heads, vocab=50257, positions=1024, **other):
    return ModelShape(
        num_layers=num_layers,
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=num_heads,
        num_groups=num_heads,
        head_dim=hidden // num_heads,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // 128) * 128,
        max_positions=positions,
        **other,
    )


def llama(num_layers, hidden, ffn, num_heads, num_groups, vocab, head_dim=None, **other):
    facts = {"bias_qkv": False, "tied": False} | other
    return ModelShape(
        num_layers=num_layers,
        hidden=hidden,
        ffn=ffn,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim or hidden // num_heads,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // 128) * 128,
        max_positions=8192,
        activation="swiglu",
        normalization="RMSNorm",
        position="rope",
        bias_linear=False,
        **facts,
    )


GPT2 = gpt(12, 768, 12)
LLAMA3_8B = llama(32, 4096, 14336, 32, 8, 128256)
MIXTRAL = llama(32, 4096, 14336, 32, 8, 32000, num_experts=8, moe_ffn=14336, moe_topk=2)

# Parameter counts of the published checkpoints.
PUBLISHED = {
    "gpt2": (GPT2, 124_439_808),
    "gpt2-medium": (gpt(24, 1024, 16), 354_823_168),
    "gpt2-xl": (gpt(48, 1600, 25), 1_557_611_200),
    "llama2-7b": (llama(32, 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "llama3-8b": (LLAMA3_8B, 8_030_261_248),
    "llama3-70b": (llama(80, 8192, 28672, 64, 8, 128256), 70_553_706_496),
    "llama3.2-1b": (llama(16, 2048, 8192, 32, 8, 128256, tied=True), 1_235_814_400),
    "llama3.2-3b": (llama(28, 3072, 8192, 24, 8, 128256, tied=True), 3_212_749_824),
    "mistral-7b": (llama(32, 4096, 14336, 32, 8, 32000), 7_241_732_096),
    "qwen2.5-7b": (llama(28, 3584, 18944, 28, 4, 152064, bias_qkv=True), 7_615_616_512),
    "qwen3-0.6b": (llama(28, 1024, 3072, 16, 8, 151936, 128, qk_norm="norm", tied=True), 596_049_920),
    "qwen3-8b": (llama(36, 4096, 12288, 32, 8, 151936, 128, qk_norm="norm"), 8_190_735_360),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704),
}


@st.composite
def shapes(draw, moe=False, mtp=False):
    """Any model: odd sizes, every activation, norm, position, bias; experts and depths on request."""
    small = st.integers(1, 9)
    groups = draw(st.integers(1, 4))
    vocab = draw(st.integers(2, 300))
    layers = draw(st.integers(1, 4))
    shape = ModelShape(
        num_layers=layers,
        hidden=draw(st.integers(1, 70)),
        ffn=draw(st.integers(1, 90)),
        num_heads=groups * draw(st.integers(1, 3)),
        num_groups=groups,
        head_dim=2 * draw(small),
        vocab_size=vocab,
        padded_vocab_size=vocab + draw(st.integers(0, 50)),
        max_positions=draw(st.integers(1, 64)),
        activation=draw(
            st.sampled_from(["gelu", "gelu-tanh", "squared-relu", "quick-geglu", "geglu", "swiglu"])
        ),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        position=draw(st.sampled_from(["learned_absolute", "rope", "none"])),
        bias_linear=draw(st.booleans()),
        bias_qkv=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "norm", "l2"])),
        tied=draw(st.booleans()),
    )
    if moe:
        experts = draw(st.integers(1, 6))
        shape = replace(
            shape,
            num_experts=experts,
            moe_ffn=draw(st.integers(1, 60)),
            moe_topk=draw(st.integers(1, experts)),
            moe_shared_ffn=draw(st.integers(0, 30)),
            moe_layer_pattern=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        )
    return replace(shape, mtp_num_layers=draw(st.integers(1, 3))) if mtp else shape
