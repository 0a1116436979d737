"""Kernels and operators by their names, as the libraries write them."""

import pytest

from redline.ledger.causes import cause_of_work
from redline.ledger.groups import group_of, sends_of
from redline.ledger.kinds import kernel_kind, kind_of, operator_kind, runtime_call
from redline.ledger.places import Place

KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>(Params)": "gemm",
    "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(params)": "gemm",
    "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64_MI16x16x16x1": "gemm",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<X>(Flash_bwd_params)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(X)": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90_FlashAttentionForwardSm90": "attention",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)": "collective",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void multi_tensor_apply_kernel<L2NormFunctor<float>>(int)": "optimizer",
    "_adamw_kernel": "optimizer",
    "void at::native::vectorized_layer_norm_kernel<float, float>(int)": "norm",
    "void transformer_engine::normalization::ln_fwd_tuned_kernel": "norm",
    "_rms_norm_fwd_kernel": "norm",
    "void at::native::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>": "loss",
    "_cross_entropy_kernel": "loss",
    "_norm_cast_kernel": "norm",
    "_activation_cast_bwd_kernel": "activation",
    "_cast_kernel": "quantize",
    "_cast_both_kernel": "quantize",
    "_block_cast_kernel": "quantize",
    "_transpose_kernel": "quantize",
    "_gated_fwd_kernel": "activation",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "activation",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "cast",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "triton_poi_fused_add_mul_0": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "reduce",
    "some_unheard_of_thing": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name) -> None:
    assert kernel_kind(name) == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::_scaled_dot_product_flash_attention_backward", "attention"),
        ("FlashAttnFuncBackward", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::native_layer_norm_backward", "norm"),
        ("RMSNormFnBackward", "norm"),
        ("CrossEntropyFn", "loss"),
        ("aten::_log_softmax", "loss"),
        ("aten::silu_backward", "activation"),
        ("redline::fp8_norm_cast", "norm"),
        ("redline::fp8_activation_cast_bwd", "activation"),
        ("redline::fp8_cast", "quantize"),
        ("redline::fp8_transpose", "quantize"),
        ("redline::fp8_add_wgrad", "gemm"),
        ("aten::copy_", "copy"),
        ("aten::add_", "elementwise"),
        ("c10d::allreduce_", "collective"),
        ("GemmFn", None),
    ],
)
def test_operators(name, kind) -> None:
    assert operator_kind(name) == kind


def test_a_product_inside_a_loss_is_a_product_and_an_elementwise_kernel_there_is_the_loss() -> None:
    assert kind_of("nvjet_tst_128x256", "LinearCrossEntropyFn") == "gemm"
    assert kind_of("vectorized_elementwise_kernel<4>", "LinearCrossEntropyFn") == "loss"
    assert kind_of("vectorized_elementwise_kernel<4>", "") == "elementwise"


@pytest.mark.parametrize("module", ["attention.qkv_site", "mlp.fc2_site", "mlp"])
def test_what_fp8_turns_and_casts_for_its_products_is_no_norm_and_no_activation(module) -> None:
    """Though it runs inside the site of either, whose own small kernels are theirs."""
    place = Place(phase="backward", module=module)
    for kernel, operator in ("_transpose_kernel", "redline::fp8_transpose"), ("_cast_kernel", ""):
        assert cause_of_work(kind_of(kernel, operator), place) == "cast"
    assert cause_of_work(kind_of("_norm_cast_kernel", "redline::fp8_norm_cast"), place) == "norm"
    site = "norm" if "qkv" in module else "activation" if "fc2" in module else "cast"
    assert cause_of_work(kind_of("direct_copy_kernel_cuda", ""), place) == site


def test_runtime_calls() -> None:
    assert runtime_call("cudaMalloc") == runtime_call("cudaFree") == "allocation"
    assert runtime_call("cuMemCreate") == "allocation"
    assert runtime_call("cudaMallocAsync") == "call"
    assert runtime_call("cudaStreamSynchronize") == runtime_call("cudaMemcpy") == "synchronisation"
    assert runtime_call("cudaMemcpyAsync") == runtime_call("cudaLaunchKernelExC") == "call"


@pytest.mark.parametrize(
    ("description", "collective", "group"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "_allgather_base", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "_reduce_scatter_base", "dp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "send", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "all_to_all", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "all_to_allv", "ep"),
        ("mesh_tp", "allreduce", "tp"),
        ("mesh_dp_shard", "_allgather_base", "dp"),
        ("default_pg 0", "allreduce", "collective"),
        ("", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "pp"),
        ("", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective"),
    ],
)
def test_groups(description, collective, group) -> None:
    assert group_of(description, collective) == group


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ([], "pp"),
        (["default_pg", "undefined", "tp", "dp"], "tp"),
        (["TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"], "pp"),
        (["TENSOR_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP"], "cp"),
        (["DATA_PARALLEL_GROUP"], "pp"),
    ],
)
def test_sends_that_name_no_group(groups, axis) -> None:
    assert sends_of(groups) == axis
    assert group_of("", "gloo:send", axis) == axis and group_of("", "gloo:broadcast", axis) == "collective"
    assert group_of("PIPELINE_MODEL_PARALLEL_GROUP", "recv", axis) == "pp"
