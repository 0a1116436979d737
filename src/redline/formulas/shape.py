"""The numbers that define a model, resolved: what formulas, plan and model all read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["gelu", "gelu-tanh", "squared-relu", "quick-geglu", "geglu", "swiglu"]
Normalization = Literal["LayerNorm", "RMSNorm"]
PositionEmbedding = Literal["learned_absolute", "rope", "none"]
QKNorm = Literal["none", "norm", "l2"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]

GATED: frozenset[Activation] = frozenset(("quick-geglu", "geglu", "swiglu"))


@dataclass(frozen=True, slots=True)
class TpRank:
    """One of `size` tensor-parallel ranks; the default holds everything."""

    size: int = 1
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3 scaling of the rotary frequencies (long wavelengths divided by `factor`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One transformer, every default resolved. Sizes are global (before any parallel split).

    `vocab_size` is the tokenizer's true size; `padded_vocab_size` only shapes the stored matrices.
    """

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    activation: Activation = "gelu-tanh"
    activation_clamp: float | None = None
    glu_offset: float = 0.0
    normalization: Normalization = "LayerNorm"
    norm_epsilon: float = 1e-5
    zero_centered_gamma: bool = False
    position: PositionEmbedding = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    bias_linear: bool = True
    bias_qkv: bool = True
    qk_norm: QKNorm = "none"
    tied: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    softmax_scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    softmax_type: SoftmaxType = "vanilla"
    init_std: float = 0.02
    embedding_init_std: float = 0.02
    # Mixture of experts: read by the formulas and the planner; training refuses num_experts > 0.
    num_experts: int = 0
    moe_ffn: int = 0
    moe_topk: int = 2
    moe_shared_ffn: int = 0
    moe_layer_pattern: tuple[bool, ...] = ()
    mtp_num_layers: int = 0

    def of_rank(self, tp: int) -> ModelShape:
        """A layer's heads, groups and ffn features on one of `tp` tensor-parallel ranks; all else whole.

        With fewer groups than ranks, neighbouring ranks hold the same one.
        """
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_groups=max(self.num_groups // tp, 1),
            ffn=self.ffn // tp,
        )

    @property
    def gated(self) -> bool:
        """Whether fc1 holds a gate and an up matrix."""
        return self.activation in GATED

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_groups * self.head_dim

    @property
    def fc1_size(self) -> int:
        """Output features of the first MLP matrix: 2 x ffn when gated."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head rotate (even)."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2
