"""What a kernel or operator does, told from its name.

The tables hold fragments of names as compilers, cuBLAS, cuDNN, NCCL, Triton, PyTorch, TransformerEngine,
FlashAttention and Apex write them; the first fragment that occurs decides, so a specific one stands before a
general one. The operator that launched a kernel is asked first: its name says more than the kernel's.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

Kind = Literal[
    "gemm",
    "attention",
    "norm",
    "activation",
    "rope",
    "loss",
    "embedding",
    "dropout",
    "optimizer",
    "quantize",
    "cast",
    "copy",
    "elementwise",
    "reduce",
    "collective",
    "other",
]

# Fragments are looked for in lower case.
_OPERATORS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("collective", ("c10d::", "nccl:", "gloo:", "record_param_comms", "_c10d_functional")),
    (
        "optimizer",
        ("adam", "optimizer", "_foreach_", "_fused_sgd", "grad_norm", "gradnorm", "multi_tensor", "lion"),
    ),
    ("loss", ("cross_entropy", "crossentropy", "nll_loss", "nllloss", "logsoftmax", "log_softmax")),
    (
        "attention",
        (
            "scaled_dot_product", "scaleddotproduct", "flash_att", "flashatt", "flash_attn", "fused_attn",
            "fusedattn", "efficient_attention", "efficientattention", "cudnn_attention", "flex_attention",
            "attentionfn", "attnfunc",
        ),
    ),
    ("norm", ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "qk_norm", "qknorm", "fp8_norm_cast")),
    ("rope", ("rotary", "rope")),
    (
        "activation",
        (
            "bias_activation", "gelu", "silu", "swiglu", "geglu", "relu", "sigmoid", "tanh",
            "fp8_activation_cast",
        ),
    ),
    ("quantize", ("fp8_cast", "fp8_transpose")),
    ("embedding", ("embedding", "index_add", "index_select")),
    ("dropout", ("dropout", "bernoulli")),
    (
        "gemm",
        (
            "::mm", "::addmm", "::bmm", "::baddbmm", "_scaled_mm", "scaled_mm", "grouped_mm", "add_wgrad",
            "::linear", "mkldnn_linear", "_linear_pointwise", "wgrad_gemm",
        ),
    ),
    ("cast", ("_to_copy", "::to",)),
    ("copy", ("::copy_", "::clone", "::contiguous", "::cat", "::stack")),
    ("reduce", ("::sum", "::mean", "::max", "::amax", "::norm", "vector_norm", "_softmax", "::softmax")),
    (
        "elementwise",
        (
            "::add", "::mul", "::div", "::sub", "::pow", "::rsqrt", "::sqrt", "::exp", "::neg", "::where",
            "::masked_fill", "::fill_", "::zero_", "::square", "::addcmul", "::addcdiv", "::lerp",
        ),
    ),
)  # fmt: skip

_KERNELS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("collective", ("nccl", "rccl", "all_reduce_kernel", "allreduce_kernel", "symm_mem", "multimem",
                    "symmetric_memory", "barrier_kernel")),
    (
        "attention",
        ("flash_fwd", "flash_bwd", "fmha", "flash::", "flashattn", "flash_attn", "flashfwd", "flashbwd",
         "attention", "attn", "cudnn_generated_fort_native_sdpa", "sdpa",
         "compute_dot_do_o", "convert_dq_to_16"),  # cuDNN's, before and after its backward
    ),
    (
        "gemm",
        ("gemm", "nvjet", "cutlass", "cublas", "xmma", "_mm_", "matmul", "gemv", "splitk", "wgrad",
         "triton_mm", "tensorop", "hgmma", "cijk_"),
    ),
    ("optimizer", ("adam", "multi_tensor_apply", "multitensorapply", "l2norm", "grad_norm", "lpnormfunctor")),
    ("loss", ("cross_entropy", "nll_loss", "logsoftmax", "softmaxforward", "softmaxbackward")),
    ("norm", ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "ln_fwd", "ln_bwd", "gammabeta", "qk_norm",
              "norm_cast")),
    ("rope", ("rotary", "rope")),
    ("activation", ("gelu", "silu", "swiglu", "geglu", "relu", "sigmoid", "gated", "tanh",
                    "activation_cast")),
    ("dropout", ("dropout", "bernoulli", "philox")),
    ("embedding", ("embedding", "indexselect", "index_add", "index_put", "gather")),
    ("quantize", ("_cast_kernel", "_cast_both_kernel", "_transpose_kernel", "cast_transpose")),
    ("cast", ("to_copy", "direct_copy", "cast", "bfloat16_copy", "float8_copy", "copy_device_to_device")),
    ("copy", ("memcpy", "memset", "catarray", "copy_kernel", "transpose", "permute", "fillfunctor")),
    ("reduce", ("reduce", "softmax", "cumsum", "scan", "sort")),
    ("elementwise", ("elementwise", "vectorized", "triton_poi", "pointwise")),
)  # fmt: skip


@cache
def operator_kind(name: str) -> Kind | None:
    """The kind of an operator ("aten::mm", "RMSNormFnBackward"), None when its name does not say."""
    return _look_up(_OPERATORS, name)


@cache
def kernel_kind(name: str) -> Kind:
    """The kind of a kernel by its own name; "other" when that does not say."""
    return _look_up(_KERNELS, name) or "other"


def kind_of(kernel: str, operator: str) -> Kind:
    """The kind of a kernel and the operator that launched it ("" when that is not known).

    A kernel's name decides where it is one of those that are never something else (a product inside a loss
    is a product); otherwise the operator's does, where it says.
    """
    own = kernel_kind(kernel)
    if own in ("collective", "attention", "gemm", "quantize"):
        return own
    return operator_kind(operator) or own


def _look_up(table: tuple[tuple[Kind, tuple[str, ...]], ...], name: str) -> Kind | None:
    lower = name.lower()
    return next((kind for kind, parts in table if any(part in lower for part in parts)), None)


# Calls of the device's runtime by what they mean for the host.
_ALLOCATIONS = ("cudamalloc", "cudafree", "cudahostalloc", "cumemcreate", "cumemmap", "cumemunmap",
                "cumemrelease", "hipmalloc", "hipfree", "cumemsetaccess", "cumemaddress")  # fmt: skip
_BLOCKING = frozenset(("cudamemcpy", "hipmemcpy", "hipmemcpywithstream"))


@cache
def runtime_call(name: str) -> Literal["allocation", "synchronisation", "call"]:
    """Whether a call of the runtime may stall in the allocator, waits for the device, or neither."""
    lower = name.lower()
    if any(part in lower for part in _ALLOCATIONS) and "async" not in lower:
        return "allocation"
    return "synchronisation" if "synchronize" in lower or lower in _BLOCKING else "call"
