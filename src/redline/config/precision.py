"""[precision]: dtypes of compute, gradients and GEMM operands."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import SET, Section, flag
from redline.config.waits import (
    CUSTOM_RECIPE,
    FP4,
    FP8,
    FP8_ATTENTION,
    KITCHEN_PACKAGE,
    LOCAL_AMAX,
    NUMERICS,
    QUANTIZED,
)

ON_FP8 = {"fp8_format": SET}
DELAYED = {"fp8_format": SET, "fp8_recipe": "delayed"}
MXFP8 = {"fp8_format": SET, "fp8_recipe": "mxfp8"}
FIRST_LAST = {"first_last_layers_bf16": True}
KITCHEN = {"kitchen_quantize": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig(Section):
    """One recipe for the run; with none of the four switches bf16 on a GPU and fp32 on a CPU."""

    title: ClassVar[str] = "Precision"
    account: ClassVar[str] = "kernels"

    bf16: bool = flag(
        False, short=True, excludes="precision", help="Compute in bfloat16, main parameters in fp32."
    )
    fp16: bool = flag(False, short=True, excludes="precision", help="Compute in float16 with loss scaling.")
    fp32: bool = flag(False, own=True, excludes="precision", help="Compute in float32.")
    fp64: bool = flag(
        False, own=True, excludes="precision", help="Everything in float64, to compare layouts."
    )
    accumulate_allreduce_grads_in_fp32: bool | None = flag(
        None,
        megatron=False,
        built_in="gradients are accumulated in fp32 unless --grad-reduce-in-bf16 is given.",
        help="Accumulate and reduce gradients in fp32.",
    )
    grad_reduce_in_bf16: bool = flag(
        False, account="communication", needs={"bf16": True}, help="Accumulate and reduce gradients in bf16."
    )
    attention_softmax_in_fp32: bool | None = flag(
        None,
        megatron=False,
        built_in="attention's softmax runs in fp32 at least.",
        help="Softmax of attention in fp32.",
    )
    fp32_residual_connection: bool = flag(False, waits_for=NUMERICS, help="Keep the residual stream in fp32.")

    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        None,
        shorthands={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"},
        help="GEMMs of the layers in fp8: all tensors E4M3, or E4M3 forward and E5M2 for gradients (hybrid).",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "custom"] = flag(
        "delayed",
        needs=ON_FP8,
        help="How fp8 scales are found.",
        refused={"custom": CUSTOM_RECIPE},
    )
    fp8_quantizer_factory: str | None = flag(
        None, waits_for=CUSTOM_RECIPE, help="Python path of a custom recipe."
    )
    fp8_margin: int = flag(
        0,
        at_least=0,
        at_most=14,  # at 15 the largest value itself becomes a subnormal of E4M3
        other=1,
        needs=DELAYED,
        help="Divide scales by 2^margin.",
    )
    fp8_interval: int = flag(1, at_least=1, needs=DELAYED, help="Steps between updates of the scales.")
    fp8_amax_history_len: int = flag(
        1024,
        at_least=1,
        megatron=1,
        needs=DELAYED,
        help="Steps whose largest value sets the scale.",
    )
    fp8_amax_compute_algo: Literal["max", "most_recent"] = flag(
        "max", megatron="most_recent", needs=DELAYED, help="Which value of the history counts."
    )
    fp8_wgrad: bool = flag(True, needs=ON_FP8, help="Weight gradients in fp8 too.")
    fp8_keep_bf16: tuple[str, ...] = flag(
        (),
        own=True,
        needs=ON_FP8,
        metavar="PATTERN",
        other=("layers.0.*",),
        help='GEMMs to keep in bf16: shell patterns over names like "layers.3.mlp.fc2".',
    )
    fp8_emulate: bool = flag(
        False,
        own=True,
        needs={"fp8_format": SET, "fp8_recipe": ("blockwise", "mxfp8")},
        help="Compute GEMMs of scaled blocks in fp32 from their fp8 operands: slow, on any device.",
    )
    fp8_stats_interval: int | None = flag(
        None,
        at_least=1,
        own=True,
        account="host",
        needs=ON_FP8,
        help="Steps between tables of what casts to fp8 lose, into fp8.jsonl; unset: none.",
    )
    fp8_return_to_bf16: int | None = flag(
        None,
        at_least=1,
        own=True,
        needs=DELAYED,
        help="A GEMM returns to bf16 once an operand saturated in so many steps in a row; unset: never.",
    )
    fp8_param_gather: bool | None = flag(
        None,
        megatron=False,
        account="memory",
        needs=ON_FP8,
        unset="on where that can be",
        help="Keep the weights of GEMMs in fp8 alone, and gather them as bytes.",
    )
    first_last_layers_bf16: bool = flag(False, needs=ON_FP8, help="First and last layers in bf16.")
    num_layers_at_start_in_bf16: int | None = flag(
        None, at_least=0, megatron=1, other=2, needs=FIRST_LAST, help="How many first layers; unset: 1."
    )
    num_layers_at_end_in_bf16: int | None = flag(
        None, at_least=0, megatron=1, other=2, needs=FIRST_LAST, help="How many last layers; unset: 1."
    )
    fp8_output_proj: bool = flag(
        False,
        needs=ON_FP8,
        help="The output head in fp8, its gradient always in E5M2 (the weight's stays in bf16).",
    )
    fp8_dot_product_attention: bool = flag(
        False, waits_for=FP8_ATTENTION, needs=ON_FP8, help="Attention's products in fp8."
    )
    fp8_multi_head_attention: bool = flag(
        False,
        waits_for=FP8_ATTENTION,
        needs={"fp8_dot_product_attention": True},
        help="Attention's input and output in fp8 too.",
    )
    tp_only_amax_red: bool = flag(
        False, waits_for=LOCAL_AMAX, needs=ON_FP8, help="Share largest values among tp ranks alone."
    )
    activation_func_fp8_input_store: bool = flag(
        False,
        account="memory",
        waits_for=FP8,
        needs={"activation_func": "swiglu"},
        help="Save SwiGLU's input in fp8.",
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(
        False,
        account="memory",
        waits_for=FP8,
        needs=MXFP8,
        help="Gather mxfp8 parameters through the gradient buffer.",
    )
    keep_fp8_transpose_cache: bool = flag(
        False,
        account="memory",
        needs=ON_FP8,
        help="Keep transposed fp8 weights through a step: a byte a parameter, less to do in each backward.",
    )
    parameter_transpose_cache: bool = flag(
        True,
        account="memory",
        needs=ON_FP8,
        help="Cast weights to fp8 once a step; off: in each pass, and none of it is kept.",
    )
    te_precision_config_file: str | None = flag(
        None, metavar="FILE", waits_for=QUANTIZED, help="YAML file that gives modules their recipes."
    )
    fp4_format: Literal["e2m1"] | None = flag(None, waits_for=FP4, help="GEMMs in 4-bit floating point.")
    fp4_recipe: Literal["nvfp4", "custom"] = flag(
        "nvfp4", waits_for=FP4, needs={"fp4_format": SET}, help="How fp4 scales are found."
    )
    fp4_param_gather: bool = flag(
        False, account="memory", waits_for=FP4, needs={"fp4_format": SET}, help="Keep compute weights in fp4."
    )

    kitchen_quantize: bool = flag(False, own=True, waits_for=QUANTIZED, help="Quantized training.")
    kitchen_quant_method: Literal["int8", "int4", "mxfp4"] = flag(
        "int8", own=True, waits_for=QUANTIZED, needs=KITCHEN, help="Number format of quantized tensors."
    )
    kitchen_quant_target: tuple[Literal["weights", "activations", "gradients"], ...] = flag(
        ("weights",),
        own=True,
        waits_for=QUANTIZED,
        needs=KITCHEN,
        other=("weights", "activations"),
        help="Classes of tensors to quantize.",
    )
    kitchen_quant_layers: str | None = flag(
        None,
        own=True,
        metavar="RANGES",
        other="1-4",
        waits_for=QUANTIZED,
        needs=KITCHEN,
        help="Layers to quantize, for example 2-29; unset: all.",
    )
    kitchen_config_file: str | None = flag(
        None, metavar="FILE", waits_for=KITCHEN_PACKAGE, help="YAML file of recipes."
    )
    kitchen_recipe_number: int | None = flag(
        None, at_least=0, waits_for=KITCHEN_PACKAGE, help="One recipe for all."
    )
    use_kitchen_attention: bool = flag(False, waits_for=QUANTIZED, help="Quantized attention.")
    kitchen_attention_backend: Literal["sdpa", "fa"] = flag(
        "sdpa",
        waits_for=QUANTIZED,
        needs={"use_kitchen_attention": True},
        help="Which quantized attention.",
    )
