"""Accounts of traces with known contents: who owns the time, what was useful, what it is blamed on."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import DataError
from redline.ledger.account import Reference, read_account, write_account
from redline.ledger.causes import CAUSES
from redline.ledger.ranks import join_ranks
from redline.ledger.take import take_account

from .traces import AUTOGRAD, MAIN, TraceFile

GEMM, FLASH, NORM = "nvjet_tst_128x256", "flash_fwd_kernel", "_rms_norm_fwd_kernel"
H200 = Reference(kind="cuda", peak_flops_per_s=1e15, bandwidth_bytes_per_s=4.8e12)


def account(made: TraceFile, tmp_path, reference: Reference = H200):
    found = take_account(made.read(tmp_path), reference)
    total = (found.ideal_ms or 0.0) + sum(each.ms for each in found.losses)
    assert total == pytest.approx(found.wall_ms, rel=1e-12)
    if found.mfu is not None:
        assert 100 - sum(each.points for each in found.losses) == pytest.approx(100 * found.mfu, abs=1e-9)
    return found


def step(start: float, dur: float, number: int = 5) -> TraceFile:
    made = TraceFile()
    made.mark(f"redline:step={number}", start, dur)
    return made


def test_a_step_of_one_gemm_its_launch_and_unknown(tmp_path) -> None:
    made = step(0, 1000)
    made.op("aten::mm", 100, 10, dims=[[1024, 1024], [1024, 1024]])
    made.kernel(GEMM, 150, 500, launched=104)
    found = account(made, tmp_path)
    assert found.steps == (5,) and found.wall_ms == 1.0
    ideal = 2 * 1024**3 / 1e15 * 1e3
    assert found.ideal_ms == pytest.approx(ideal) and found.reference.flops_source == "shapes"
    assert found.loss_ms("gemm") == pytest.approx(0.5 - ideal)
    assert found.loss_ms("launch") == pytest.approx(0.05)  # the operator, then the launch under way
    assert found.loss_ms("unknown") == pytest.approx(0.45)


def test_compute_owns_what_overlaps_and_collectives_count_where_they_are_exposed(tmp_path) -> None:
    made = step(0, 1000)
    made.kernel(GEMM, 100, 300, launched=90)
    made.kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        200,
        400,
        launched=95,
        stream=20,
        **{"Collective name": "allreduce", "Process Group Description": "mesh_dp", "Group size": 8},
    )
    made.kernel(
        "ncclDevKernel_AllGather_RING_LL",
        700,
        100,
        launched=99,
        stream=24,
        **{"Collective name": "_allgather_base", "Process Group Description": "mesh_tp"},
    )
    made.kernel("ncclDevKernel_SendRecv", 850, 50, launched=140, stream=28)
    found = account(made, tmp_path, Reference())
    assert found.loss_ms("gemm") == pytest.approx(0.3)
    assert found.loss_ms("dp") == pytest.approx(0.2)
    assert found.loss_ms("tp") == pytest.approx(0.1)
    assert found.loss_ms("pp") == pytest.approx(0.05)
    assert found.ideal_ms is None and found.mfu is None and found.losses[0].points is None
    assert {each.key: each.account for each in found.losses}["dp"] == "communication"


def test_idle_time_is_named_only_with_evidence(tmp_path) -> None:
    made = step(0, 1000)
    made.mark("redline:host=data", 0, 200)
    made.mark("redline:host=logging", 200, 50)
    made.runtime("cudaMalloc", 300, 100)
    made.mark("redline:phase=forward", 420, 30)
    made.kernel(GEMM, 500, 100, launched=460)
    made.op("aten::_local_scalar_dense", 600, 300)
    made.runtime("cudaStreamSynchronize", 605, 290)
    found = account(made, tmp_path)
    named = {key: found.loss_ms(key) for key in ("data", "logging", "allocator", "launch", "synchronisation")}
    assert named == pytest.approx(
        {
            "data": 0.2,
            "logging": 0.05,
            "allocator": 0.1,
            "launch": 0.03 + 0.04 + 0.01,
            "synchronisation": 0.29,
        }
    )
    assert found.loss_ms("unknown") == pytest.approx(0.05 + 0.02 + 0.01 + 0.1)


def test_a_loader_thread_that_never_launches_is_no_evidence(tmp_path) -> None:
    made = step(0, 1000)
    made.op("aten::stack", 0, 900, thread=555)
    made.kernel(GEMM, 900, 100, launched=895)
    assert account(made, tmp_path).loss_ms("unknown") == pytest.approx(0.895)


def test_gaps_after_a_wait_are_its_doing_until_the_host_is_ahead_again(tmp_path) -> None:
    made = step(0, 1000)
    made.kernel(GEMM, 0, 100, launched=-10)
    made.runtime("cudaDeviceSynchronize", 5, 100)
    made.kernel(NORM, 140, 10, launched=130)  # late because of the wait
    made.kernel(NORM, 170, 100, launched=160)  # still behind
    made.kernel(GEMM, 270, 100, launched=180)  # ahead
    made.kernel(NORM, 400, 600, launched=390)  # late for another reason
    found = account(made, tmp_path)
    assert found.loss_ms("synchronisation") == pytest.approx(0.04 + 0.02)
    assert found.loss_ms("launch") == pytest.approx(0.01)
    assert found.loss_ms("unknown") == pytest.approx(0.02)


def test_copies_between_host_and_device_are_the_hosts_and_on_the_device_casts(tmp_path) -> None:
    made = step(0, 1000)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 0, 100, launched=-5, category="gpu_memcpy", bytes=4096)
    made.kernel("Memcpy DtoD (Device -> Device)", 100, 50, launched=20, category="gpu_memcpy", bytes=4096)
    made.kernel("Memset (Device)", 150, 25, launched=30, category="gpu_memset", bytes=4096)
    made.mark("redline:module=offload", 170, 30)
    made.kernel("Memcpy DtoH (Device -> Pinned)", 200, 300, launched=180, category="gpu_memcpy", bytes=4096)
    found = account(made, tmp_path)
    assert found.loss_ms("copies") == pytest.approx(0.1)
    assert found.loss_ms("cast") == pytest.approx(0.075)
    assert found.loss_ms("offload") == pytest.approx(0.3)


def test_copies_between_devices_are_communication_where_nothing_hides_them(tmp_path) -> None:
    made = step(0, 1000)
    made.kernel("Memcpy PtoP (Device -> Device)", 0, 300, launched=-5, category="gpu_memcpy", bytes=4096)
    made.kernel(GEMM, 100, 150, launched=20)
    barrier = "c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)"
    made.kernel(barrier, 300, 50, launched=30)
    assert account(made, tmp_path).loss_ms("collective") == pytest.approx(0.2)


def a_layer(made: TraceFile, *, recompute: bool) -> None:
    """x [64, 32] times W [16, 32] in layer 3, its norm, and their backward on the autograd thread."""
    made.mark("redline:phase=forward", 0, 100)
    made.mark("redline:layer=3", 10, 80)
    made.mark("redline:module=fc1", 20, 60)
    forward = made.op("GemmFn", 30, 40, sequence=70, dims=[[8, 8, 32], [16, 32]])
    made.op("aten::mm", 40, 10, dims=[[64, 32], [32, 16]])
    made.kernel(GEMM, 100, 100, launched=42)
    # An operator of the same number on another thread must not be taken for it.
    made.op("Other", 5, 2, thread=AUTOGRAD, sequence=70)
    node = "autograd::engine::evaluate_function: GemmFnBackward"
    made.op(node, 300, 200, AUTOGRAD, sequence=70, backward=True)
    backward = made.op("GemmFnBackward", 305, 190, AUTOGRAD, sequence=70, backward=True)
    made.arrow(forward, backward)
    if recompute:
        made.op("SiluFn", 310, 10, AUTOGRAD, sequence=3)
        made.op("aten::silu", 311, 8, AUTOGRAD)
        made.kernel("silu_kernel", 350, 50, launched=312, thread=AUTOGRAD)
    made.op("aten::mm", 330, 10, AUTOGRAD, dims=[[64, 16], [16, 32]])
    made.kernel(GEMM, 400, 100, launched=332, thread=AUTOGRAD)
    made.op("aten::addmm", 350, 10, AUTOGRAD, dims=[[16, 32], [16, 64], [64, 32]])
    made.kernel(GEMM, 500, 100, launched=352, thread=AUTOGRAD)


def test_backward_kernels_belong_to_the_layer_and_module_of_their_forward(tmp_path) -> None:
    made = step(0, 1000)
    a_layer(made, recompute=True)
    found = account(made, tmp_path)
    modules = {(each.phase, each.layer, each.module): each.ms for each in found.modules}
    assert modules == pytest.approx(
        {("forward", 3, "fc1"): 0.1, ("backward", 3, "fc1"): 0.2, ("recompute", 3, "fc1"): 0.05}
    )
    assert found.loss_ms("recompute") == pytest.approx(0.05)
    roles = {(each.name, each.phase): each.role for each in found.operators}
    assert roles["aten::mm", "forward"] == "fprop"
    assert roles["aten::mm", "backward"] == "dgrad"
    assert roles["aten::addmm", "backward"] == "wgrad"


def test_recomputed_products_are_not_useful_and_the_sizes_give_the_flops(tmp_path) -> None:
    made = step(0, 1000)
    a_layer(made, recompute=False)
    before = account(made, tmp_path)
    made.op("autograd::engine::evaluate_function: X", 600, 100, AUTOGRAD, sequence=71, backward=True)
    made.op("aten::mm", 610, 10, AUTOGRAD, sequence=9, dims=[[64, 32], [32, 16]])
    made.kernel(GEMM, 700, 100, launched=612, thread=AUTOGRAD)
    after = account(made, tmp_path)
    assert before.reference.model_flops == after.reference.model_flops == 3 * 2 * 64 * 32 * 16
    assert after.loss_ms("recompute") == pytest.approx(0.1)
    assert after.loss_ms("gemm") == pytest.approx(before.loss_ms("gemm"))


def test_square_products_are_told_apart_by_their_order(tmp_path) -> None:
    made = step(0, 1000)
    forward = made.op("aten::mm", 0, 5, sequence=1, dims=[[32, 32], [32, 32]])
    made.op("autograd::engine::evaluate_function: MmBackward0", 50, 50, sequence=1, backward=True)
    backward = made.op("MmBackward0", 51, 48, sequence=1, backward=True)
    made.arrow(forward, backward)
    for at in (60, 80):
        made.op("aten::mm", at, 10, dims=[[32, 32], [32, 32]])
        made.kernel(GEMM, 4 * at, at, launched=at + 2)
    ms = {each.role: each.ms for each in account(made, tmp_path).operators}
    assert ms == pytest.approx({"dgrad": 0.06, "wgrad": 0.08})


def test_work_inside_an_evaluation_is_its_own_and_optimizer_work_whatever_its_kind(tmp_path) -> None:
    made = step(0, 1000)
    made.mark("redline:host=evaluation", 0, 100)
    made.kernel(GEMM, 100, 100, launched=50)
    made.mark("redline:phase=optimizer", 200, 100)
    made.kernel("void at::native::vectorized_elementwise_kernel<4, X>", 300, 100, launched=250)
    found = account(made, tmp_path)
    assert found.loss_ms("evaluation") == pytest.approx(0.1 + 0.1)  # its kernels, and the way to them
    assert found.loss_ms("optimizer") == pytest.approx(0.1)
    assert found.loss_ms("gemm") == 0.0


def test_a_modules_name_says_whose_its_small_kernels_are(tmp_path) -> None:
    made = step(0, 1000)
    for index, module in enumerate(("final_norm", "core_attention", "head")):
        made.mark(f"redline:module={module}", 10 * index, 9)
        made.kernel("vectorized_elementwise_kernel<4>", 100 * index, 50, launched=10 * index + 1)
    made.mark("redline:module=core_attention", 40, 9)
    made.kernel(GEMM, 300, 50, launched=41)
    found = account(made, tmp_path)
    assert [found.loss_ms(key) for key in ("norm", "attention", "loss", "gemm")] == pytest.approx(
        [0.05, 0.1, 0.05, 0.0]
    )


def test_model_flops_of_the_run_come_before_those_of_the_shapes(tmp_path) -> None:
    made = step(0, 1000)
    made.op("aten::mm", 0, 10, dims=[[1024, 1024], [1024, 1024]])
    made.kernel(GEMM, 10, 500, launched=2)
    made.kernel(FLASH, 510, 300, launched=20)
    reference = Reference(peak_flops_per_s=1e15, model_flops=5e11, attention_flops=1e11)
    found = account(made, tmp_path, reference)
    assert found.ideal_ms == pytest.approx(0.5) and found.mfu == pytest.approx(0.5)
    assert found.loss_ms("gemm") == pytest.approx(0.5 - 0.4)
    assert found.loss_ms("attention") == pytest.approx(0.3 - 0.1)


def test_operators_against_their_limits(tmp_path) -> None:
    made = step(0, 1000)
    made.op("aten::mm", 0, 10, dims=[[1024, 1024], [1024, 1024]])
    made.kernel(GEMM, 10, 10, launched=2)
    made.op("aten::mul", 20, 10, dims=[[1024, 1024], [1024, 1024]], types=["float", "float"])
    made.kernel("vectorized_elementwise_kernel<4>", 40, 10, launched=22)
    rows = {each.name: each for each in account(made, tmp_path).operators}
    gemm, mul = rows["aten::mm"], rows["aten::mul"]
    assert gemm.flops == 2 * 1024**3 and gemm.bytes == 3 * 2 * 1024**2
    assert gemm.of_peak == pytest.approx(2 * 1024**3 / 1e-5 / 1e15) and gemm.limit == "compute"
    assert mul.flops is None and mul.bytes == 3 * 4 * 1024**2
    assert mul.of_bandwidth == pytest.approx(3 * 4 * 1024**2 / 1e-5 / 4.8e12) and mul.limit == "memory"


@pytest.mark.parametrize(("second_at", "ms"), [(200, 0.15), (110, 0.1)])
def test_a_product_in_the_shade_of_another_kernel_keeps_its_flops(tmp_path, second_at, ms) -> None:
    """On a stream of its own, after the first product or inside it; what runs outside the step has none."""
    made = step(0, 1000)
    for index, (start, dur) in enumerate([(100, 100), (second_at, 50), (2000, 50)]):
        made.op("aten::mm", 10 + 20 * index, 10, dims=[[1000, 1000], [1000, 1000]])
        made.kernel(GEMM, start, dur, launched=12 + 20 * index, stream=7 + index)
    found = account(made, tmp_path)
    assert found.reference.model_flops == 4e9
    (row,) = found.operators
    assert (row.calls, row.flops, row.ms) == (2, 4e9, pytest.approx(ms))
    assert sum(each.flops for each in found.modules) == 4e9


def test_rates_are_those_of_the_calls_that_own_time(tmp_path) -> None:
    """With its hidden calls a row would stand above the peak; a row of nothing else has no rate."""
    made = step(0, 1000)
    made.mark("redline:phase=optimizer", 5, 80)
    made.kernel(GEMM, 100, 300, launched=10)
    made.kernel("_adamw_kernel", 150, 10, launched=20, stream=8)
    for index, start in enumerate((200, 250, 500)):
        made.op("aten::mul", 30 + 10 * index, 8, dims=[[1024, 1024], [1024, 1024]], types=["float", "float"])
        made.kernel("vectorized_elementwise_kernel<4>", start, 10, launched=32 + 10 * index, stream=8)
    rows = {each.name: each for each in account(made, tmp_path, replace(H200, update_bytes=4.8e6)).operators}
    mul, update = rows["aten::mul"], rows["_adamw_kernel"]
    assert (mul.calls, mul.bytes) == (3, 3 * 3 * 4 * 1024**2)
    assert mul.bytes_per_s == pytest.approx(3 * 4 * 1024**2 / 10e-6)
    assert (update.calls, update.ms, update.bytes, update.bytes_per_s) == (1, 0, 4.8e6, None)


def test_a_collective_is_named_by_what_the_profiler_noted_of_it(tmp_path) -> None:
    made = step(0, 100)
    made.op("record_param_comms", 10, 20)
    facts = {"Collective name": "_allgather_base", "Process Group Description": "dp"}
    made.kernel("ncclDevKernel_AllGather_RING_LL", 40, 30, launched=15, stream=28, **facts)
    (row,) = take_account(made.read(tmp_path), Reference()).operators
    assert (row.name, row.kind) == ("nccl:_allgather_base", "collective")


@pytest.mark.parametrize("first", ["memset", "gemm"])
def test_a_memset_of_a_product_has_none_of_its_flops(tmp_path, first) -> None:
    made = step(0, 100)
    made.op("aten::mm", 10, 20, dims=[[64, 32], [32, 16]])
    at = {"memset": 40, "gemm": 45} if first == "memset" else {"memset": 60, "gemm": 40}
    made.kernel("Memset (Device)", at["memset"], 2, launched=12, category="gpu_memset")
    made.kernel("nvjet_sm90_gemm", at["gemm"], 10, launched=18)
    found = take_account(made.read(tmp_path), Reference())
    by_kind = {row.kind: row for row in found.operators}
    assert by_kind["gemm"].flops == 2 * 64 * 32 * 16 and by_kind["gemm"].bytes
    assert by_kind["copy"].flops is None and by_kind["copy"].bytes is None
    assert sum(row.flops or 0 for row in found.modules) == 2 * 64 * 32 * 16


def test_on_a_cpu_a_gap_is_a_wait_for_a_collective_that_ends_with_it(tmp_path) -> None:
    made = TraceFile(device="")
    made.mark("redline:step=5", 0, 100e3)
    made.mark("redline:phase=backward", 0, 100e3)
    for start in (0, 30e3, 60e3):
        made.op("aten::mm", start, 20e3)
    made.op("gloo:all_reduce", 10e3, 65e3, thread=AUTOGRAD)  # ends beside the last product: hidden
    made.op("gloo:all_reduce", 75e3, 20e3, thread=AUTOGRAD)  # ends when nothing runs since 80 ms: 15 exposed
    found = account(made, tmp_path, Reference())
    assert found.loss_ms("gemm") == 60
    assert found.loss_ms("collective") == pytest.approx(15)
    assert found.loss_ms("launch") == pytest.approx(25)

    made.op("gloo:all_reduce", 45e3, 15.5e3, thread=AUTOGRAD)  # who waited went on half a ms before it ended
    found = account(made, tmp_path, Reference())
    assert found.loss_ms("collective") == pytest.approx(25)


def test_several_steps_are_averaged_and_foreign_marks_on_the_device_are_the_window(tmp_path) -> None:
    made = TraceFile()
    for number in (2, 3):
        at = 1000.0 * (number - 2)
        made.mark(f"ProfilerStep#{number}", at, 100)  # the host runs ahead
        made.span("gpu_user_annotation", f"ProfilerStep#{number}", 50 + at, 950, 7)
        made.kernel(GEMM, 50 + at, 600, launched=at + 10)
    found = account(made, tmp_path)
    assert found.steps == (2, 3)
    assert found.wall_ms == pytest.approx(1950 / 2 / 1e3)
    assert found.loss_ms("gemm") == pytest.approx(0.6)


@pytest.mark.parametrize("streams", [(7,), (20,), (7, 20), (20, 7)])
def test_a_foreign_step_on_several_streams_is_one_step(tmp_path, streams) -> None:
    """The profiler marks a step on each stream that it ran on, there from its first kernel to its last."""
    made = TraceFile()
    reach = {7: (50, 600), 20: (500, 400)}
    for number in (0, 1):
        at = 1000.0 * number
        made.mark(f"ProfilerStep#{number}", at, 100)
        made.op("aten::mm", 5 + at, 20, dims=[[1024, 1024], [1024, 1024]])
        made.kernel(GEMM, 50 + at, 600, launched=at + 10)
        made.kernel("ncclDevKernel_AllReduce", 500 + at, 400, launched=at + 30, stream=20)
        for stream in streams:
            start, dur = reach[stream]
            made.span("gpu_user_annotation", f"ProfilerStep#{number}", start + at, dur, stream)
    found = account(made, tmp_path)
    start, end = min(reach[each][0] for each in streams), max(sum(reach[each]) for each in streams)
    assert found.steps == (0, 1)
    assert found.wall_ms == pytest.approx((1000 + end - start) / 2 / 1e3)
    assert found.reference.model_flops == 2 * 1024**3
    (product,) = (each for each in found.operators if each.name == "aten::mm")
    assert product.calls == 1 and product.flops == 2 * 1024**3


def test_a_trace_without_marks_is_accounted_whole(tmp_path) -> None:
    made = TraceFile()
    made.kernel(GEMM, 100, 50, launched=90)
    made.kernel(GEMM, 200, 50, launched=110)
    found = account(made, tmp_path)
    assert found.steps == () and found.wall_ms == pytest.approx(0.15)


MICROSECONDS = st.integers(0, 400)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([GEMM, FLASH, NORM, "ncclDevKernel_X", "Memcpy HtoD (Pinned -> Device)"]),
            MICROSECONDS, MICROSECONDS, st.integers(0, 3),
        ),
        min_size=1, max_size=15,
    ),
    st.lists(
        st.tuples(
            st.sampled_from(["redline:host=data", "redline:phase=forward", "aten::add",
                             "cudaDeviceSynchronize", "cudaMalloc"]),
            MICROSECONDS, MICROSECONDS,
        ),
        max_size=8,
    ),
)  # fmt: skip
def test_whatever_a_trace_holds_its_parts_sum_to_its_wall_time(tmp_path_factory, kernels, host) -> None:
    made = step(100, 300)
    for name, start, dur, stream in kernels:
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        made.kernel(name, start, dur, launched=start - 20, stream=stream, category=category)
    for name, start, dur in host:
        if name.startswith("cuda"):
            made.runtime(name, start, dur)
        elif name.startswith("redline"):
            made.mark(name, start, dur)
        else:
            made.op(name, start, dur)
    found = account(made, tmp_path_factory.mktemp("t"), Reference(peak_flops_per_s=1e15, model_flops=1e9))
    assert found.wall_ms == pytest.approx(0.3)
    busy = sum(each.ms for each in found.losses if each.account in ("kernels", "communication"))
    assert -1e-9 <= found.loss_ms("unknown") <= 0.3 and busy + found.ideal_ms <= 0.3 + 1e-9


@pytest.mark.parametrize("device", ["NVIDIA H200", ""])
def test_sends_without_a_group_count_to_the_axis_that_sends(tmp_path, device) -> None:
    """Of the groups that the trace lists; those of one rank send nothing."""
    groups = {"default_pg": [0, 1], "tp": [0, 1], "PIPELINE_MODEL_PARALLEL_GROUP": [0]}
    for listed, cause in ((groups, "tp"), (None, "pp"), ({**groups, "pipeline": [0, 2]}, "pp")):
        made = TraceFile(device=device, groups=listed)
        made.mark("redline:step=5", 0, 1000)
        made.op("aten::mm", 0, 10, dims=[[1024, 1024], [1024, 1024]])
        if device:
            made.kernel(GEMM, 10, 500, launched=2)
            made.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 510, 200, launched=20)
        else:
            made.op("gloo:recv", 510, 200)
        found = account(made, tmp_path, Reference())
        assert found.loss_ms(cause) == pytest.approx(0.2), cause


def of_rank(rank: int, exposed: float, tmp_path):
    made = TraceFile(rank=rank, world_size=2)
    made.mark("redline:step=5", 0, 1000)
    made.op("aten::mm", 0, 10, MAIN, dims=[[1024, 1024], [1024, 1024]])
    made.kernel(GEMM, 10, 500, launched=2)
    made.kernel(
        "ncclDevKernel_AllReduce",
        510,
        exposed,
        launched=20,
        **{"Collective name": "allreduce", "Process Group Description": "dp"},
    )
    return account(made, tmp_path)


def test_ranks_are_joined_by_mean_worst_and_skew(tmp_path) -> None:
    joined = join_ranks([of_rank(1, 300, tmp_path), of_rank(0, 100, tmp_path)])
    assert [rank.rank for rank in joined.ranks] == [0, 1]
    assert joined.loss_ms("dp") == pytest.approx(0.2)
    spread = {each.key: each for each in joined.spread}
    assert (spread["dp"].worst_rank, spread["dp"].worst_ms) == (1, pytest.approx(0.3))
    assert spread["dp"].skew == pytest.approx(0.5) and spread["wall"].skew == pytest.approx(0.0)
    assert joined.ideal_ms + sum(each.ms for each in joined.losses) == pytest.approx(joined.wall_ms)
    product = next(each for each in joined.operators if each.name == "aten::mm")
    assert product.ms == pytest.approx(0.5) and product.calls == 1 and product.flops == 2 * 1024**3


def test_an_account_is_read_as_it_was_written(tmp_path) -> None:
    joined = join_ranks([of_rank(0, 100, tmp_path), of_rank(1, 300, tmp_path)])
    write_account(tmp_path / "ledger.json", joined)
    assert read_account(tmp_path / "ledger.json") == joined


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("wall_ms", "long", "wall_ms is 'long'"),
        ("mfu", [], "mfu is \\[\\]"),
        ("losses", [{"key": 3}], "mends. is missing"),
        ("operators", [3], "int"),
        ("reference", {"colour": "red"}, "colour"),
        ("version", 99, "version is 99"),
    ],
)
def test_a_changed_account_is_refused_with_what_is_wrong(tmp_path, key, value, says) -> None:
    document = of_rank(0, 100, tmp_path).as_dict() | {key: value}
    (tmp_path / "ledger.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=says):
        read_account(tmp_path / "ledger.json")


def test_every_cause_belongs_to_an_account() -> None:
    assert {cause.account for cause in CAUSES.values()} == {
        "kernels", "communication", "memory", "host", "unknown"
    }  # fmt: skip


def test_the_update_has_the_bytes_that_the_reference_states(tmp_path) -> None:
    """It runs in no operator, once a buffer: 4.8 MB in two kernels of 1 us each are half the bandwidth."""
    made = step(0, 100)
    made.mark("redline:phase=optimizer", 5, 80)
    for at in (20, 40):
        made.kernel("_adamw_kernel", at, 1, launched=at - 5)
    found = account(made, tmp_path, replace(H200, update_bytes=4.8e6))
    (row,) = (each for each in found.operators if each.name == "_adamw_kernel")
    assert row.bytes == 4.8e6 and row.of_bandwidth == pytest.approx(0.5) and row.limit == "memory"
