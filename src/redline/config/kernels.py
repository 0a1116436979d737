"""[kernels]: which implementation of the model's operators runs."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import CUSTOM_CODE, INFERENCE_ONLY, TRANSFORMER_ENGINE_PARTS


def fusion(help: str, **facts: Any) -> bool | None:
    """A fused operator: unset lets --transformer-impl decide."""
    fused: bool | None = flag(None, help=help, unset="as --transformer-impl", **facts)
    return fused


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig(Section):
    """Fused operators and their plain twins."""

    title: ClassVar[str] = "Kernels"
    account: ClassVar[str] = "kernels"

    transformer_impl: Literal["auto", "local", "fused", "transformer_engine", "inference_optimized"] = flag(
        "auto",
        short=True,
        megatron="transformer_engine",
        refused={"inference_optimized": INFERENCE_ONLY},
        help="Implementation of the model: fused kernels; local, plain PyTorch; transformer_engine, NVIDIA's "
        "modules where that package is installed; auto: fused on a GPU.",
    )
    gradient_accumulation_fusion: bool = flag(
        True, help="Add weight gradients to the main gradient inside their GEMM."
    )
    bias_gelu_fusion: bool | None = fusion(
        "One kernel for bias and GELU, plain or gated, or squared ReLU.", megatron=True
    )
    bias_swiglu_fusion: bool | None = fusion("One kernel for bias and SwiGLU.", megatron=True)
    bias_dropout_fusion: bool | None = fusion("One kernel for bias, dropout and residual.", megatron=True)
    masked_softmax_fusion: bool | None = fusion("One kernel for scale, mask and softmax.", megatron=True)
    rope_fusion: bool | None = fusion("One kernel for the rotation of queries and keys.", megatron=True)
    persist_layer_norm: bool | None = fusion("One persistent kernel for a norm.", megatron=True)
    fused_residual_rmsnorm: bool = flag(
        False, help="One kernel for residual and RMSNorm: its backward adds the residual's gradient."
    )
    embedding_fusion: bool | None = fusion(
        "One kernel for the embedding, whose gradient is summed in sorted order.", own=True
    )
    adamw_fusion: bool | None = fusion("One kernel for clipping, AdamW and the rounded parameter.", own=True)
    grad_norm_fusion: bool | None = fusion(
        "One read of the gradients for their norm and the count of zeros.", own=True
    )
    cross_entropy_loss_fusion: bool | None = fusion(
        "One kernel for the loss and its gradient.", megatron=False
    )
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = flag(
        "linear",
        megatron="native",
        refused={"te": TRANSFORMER_ENGINE_PARTS},
        help="Which fused loss: linear never holds the logits whole, native keeps them in memory.",
    )
    jit_fuser: bool | None = flag(
        None,
        megatron=True,
        built_in="no function is compiled behind the model's back.",
        already=(False,),
        help="Compile small functions with torch.compile.",
    )
    use_transformer_engine_op_fuser: bool = flag(
        False, waits_for=TRANSFORMER_ENGINE_PARTS, help="Transformer Engine's fusion of operators."
    )
    spec: tuple[str, ...] = flag((), waits_for=CUSTOM_CODE, help="Python path of a layer specification.")
