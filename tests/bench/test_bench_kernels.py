"""`redline bench kernels`: what it finds, when it refuses to time, what it prints."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from made_case import norm_case
from rich.console import Console

from redline.bench import kernels as bench_kernels
from redline.bench.gate import check, draw
from redline.bench.host_times import cut
from redline.bench.kernels import FULL, QUICK, _load, all_passed, cases_of, libraries
from redline.bench.rooms import rooms, rooms_named
from redline.bench.turns import Turns
from redline.cli.main import main
from redline.errors import UsageError
from redline.formulas.operators import OPERATORS, OPT_IN
from redline.kernels.bench_case import BenchCase, twins
from redline.kernels.common import accumulate_into
from redline.kernels.embedding import embedding
from redline.kernels.embedding.reference import embedding_reference
from redline.kernels.rms_norm import rms_norm
from redline.kernels.rotary import bench as rotary_bench
from redline.kernels.rotary.reference import rotary_reference
from redline.report import print_kernels


def embedding_case(scale: float = 1.0) -> BenchCase:
    """Its gradient is a buffer that the kernel writes behind PyTorch's back."""

    def make_inputs(device, dtype):
        weight = torch.randn(9, 16, device=device, dtype=dtype, requires_grad=True)
        return torch.arange(20, device=device) % 7, weight, torch.zeros(9, 16, device=device)

    def fused(ids, weight, main_grad):
        return embedding(ids, weight, main_grad=main_grad) * scale

    def eager(ids, weight, main_grad):
        return embedding_reference(ids, accumulate_into(weight, main_grad))

    return BenchCase(
        op="embedding", name="tiny", make_inputs=make_inputs, providers=twins(fused, eager), bytes_forward=1
    )


def test_inputs_are_drawn_alike_but_apart():
    case = norm_case(None)
    first, second = draw(case, torch.device("cpu")), draw(case, torch.device("cpu"))
    assert torch.equal(first[0], second[0]) and first[0] is not second[0]


def test_who_changes_its_inputs_has_its_own():
    """The others read the same memory, so that none has the better place in it."""
    case, device = norm_case(lambda x, w: x + w), torch.device("cpu")
    providers = {name: case.providers[name]() for name in ("fused", "eager")}
    calls = bench_kernels._calls(case, providers, device)
    assert calls["fused"]._inputs[0] is calls["eager"]._inputs[0]
    apart = bench_kernels._calls(replace(case, own_inputs=True), providers, device)
    pairs = [(apart[name]._inputs[0], calls[name]._inputs[0]) for name in providers]
    assert all(torch.equal(own, shared) and own is not shared for own, shared in pairs)
    assert pairs[0][0] is not pairs[1][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_good_operator_passes(dtype, kernel_device):
    gate = check(norm_case(lambda x, w: rms_norm(x, w, 1e-5), dtype), torch.device(kernel_device))
    assert gate.passed and 0 < gate.worst <= 1 and gate.against == "float64"
    assert check(embedding_case(), torch.device(kernel_device)).passed


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda x, w: (y := rms_norm(x, w, 1e-5)) + 0.01 * y.detach(), "output 0"),
        (lambda x, w: rms_norm(x, w.detach() * 1.0 + (w - w.detach()) * 1.1, 1e-5), "gradient 1"),
        (lambda x, w: rms_norm(x, w, 1e-5) * float("nan"), "output 0"),
    ],
    ids=["output", "gradient", "nan"],
)
def test_a_wrong_operator_is_not_timed(wrong, where, kernel_device):
    gate = check(norm_case(wrong), torch.device(kernel_device))
    assert not gate.passed and gate.where == where


def test_a_wrong_buffer_is_seen(kernel_device):
    gate = check(embedding_case(1.01), torch.device(kernel_device))
    assert not gate.passed


def test_the_order_of_a_wide_sum_is_no_fault():
    """Sums of 10,000 squares in float64 differ in their last bits with their order."""

    def reordered(grad):
        return grad.double().flip(0).reshape(100, 100).square().sum(0).sum()

    case = BenchCase(
        op="grad_norm",
        name="reordered",
        make_inputs=lambda device, dtype: (torch.randn(10_000, device=device, dtype=dtype),),
        providers=twins(reordered, lambda grad: grad.double().square().sum()),
        bytes_forward=1,
        dtype=torch.float32,
    )
    assert check(case, torch.device("cpu")).passed
    off = twins(lambda grad: reordered(grad) * (1 + 1e-14), case.providers["eager"]())
    assert not check(replace(case, providers=off), torch.device("cpu")).passed


class RoundedSoftmax(torch.autograd.Function):
    """Softmax whose backward starts from its bf16 result: sound, but not within one rounding."""

    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x.float(), -1).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, dy = ctx.saved_tensors[0].float(), dy.float()
        return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(torch.bfloat16)


def test_a_gradient_of_two_roundings_is_told_so():
    scores = lambda device, dtype: (torch.randn(64, 512, device=device, dtype=dtype, requires_grad=True),)  # noqa: E731
    eager = lambda x: torch.softmax(x.float(), -1).to(x.dtype)  # noqa: E731
    case = BenchCase(
        op="masked_softmax",
        name="rounded",
        make_inputs=scores,
        providers=twins(RoundedSoftmax.apply, eager),
        bytes_forward=1,
    )
    one, two = (check(replace(case, gradient_roundings=n), torch.device("cpu")) for n in (1, 2))
    assert one.where == "gradient 0"
    assert two.worst < one.worst and two.passed


def test_cases():
    assert len(rooms()) >= 14 and "rms_norm" in rooms()
    assert {case.op for case in cases_of()} == set(rooms())
    quick = cases_of(effort=QUICK)
    assert {case.op for case in quick} == set(rooms()) and len(quick) < len(cases_of(effort=FULL))
    heads = [case.name for case in quick if case.op == "linear_cross_entropy"]
    assert heads == ["8192 x 4096 x 128256", "8192 x 2048 x 128256"]
    assert set(libraries()) == {"liger-kernel", "quack-kernels"}
    assert {case.op for case in cases_of(["rotary", "adamw"])} == {"rotary", "adamw"}
    with pytest.raises(UsageError, match="did you mean rms_norm"):
        cases_of(["rmsnorm"])


def test_a_room_is_found_by_the_operators_name_too(capsys):
    """The page of the operators has both names, and the help all of them; a word may hold several."""
    lines = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ")[:2] for line in lines if re.match(r"\| `\w+` \|", line)]
    table = {operator.strip("`"): re.findall(r"`(\w+)`", found) for operator, found in cells}
    assert table.keys() == OPERATORS | OPT_IN
    assert {operator: rooms_named([operator]) for operator in table} == table
    assert rooms_named(["rms-norm,rope", "norm, adamw"]) == ["rms_norm", "rotary", "layer_norm", "adamw"]
    assert main(["bench", "--help"]) == 0
    assert set(rooms()) | table.keys() <= set(re.findall(r"\w+", capsys.readouterr().out))


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("norms", "did you mean norm"),
        ("swiglu", "did you mean bias_swiglu"),
        ("rms_norm,layernorm", "did you mean layer_norm"),
        ("gelu", "did you mean bias_gelu"),
        ("rop", "did you mean rope?"),
        ("quantum", "with commas between"),
        ("", "with commas between"),
    ],
)
def test_a_name_that_is_none_is_said_with_those_that_are(name, mend, capsys):
    assert main(["bench", "kernels", "--only", name]) == 2
    said = capsys.readouterr().err
    assert f"no fused operator {name.split(',')[-1]!r}" in said and mend in said
    assert "rope is rotary" in said and all(room in said for room in rooms())


class Allocator:
    """torch.cuda's counters, in a world where every operation allocates what it is told."""

    def __init__(self):
        self.now = self.peak = 0

    def hold(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def test_workspace_is_what_a_call_holds_beyond_its_inputs(monkeypatch):
    """Its forward, its backward and what both return; neither the inputs nor an earlier peak."""
    world = Allocator()
    world.hold(5000)  # a peak of others
    world.hold(-4000)

    class Tally(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            world.hold(700)  # logits
            world.hold(-600)
            return x * weight

        @staticmethod
        def backward(ctx, dy):
            world.hold(850)
            world.hold(-950)  # with what forward kept
            return dy, None

    for name, answer in (
        ("synchronize", lambda: None),
        ("reset_peak_memory_stats", lambda: setattr(world, "peak", world.now)),
        ("memory_allocated", lambda: world.now),
        ("max_memory_allocated", lambda: world.peak),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    case = norm_case(Tally.apply)
    call = bench_kernels.Call(Tally.apply, draw(case, torch.device("cpu")))
    assert [bench_kernels.workspace_bytes(call) for _ in range(2)] == [950, 950]
    assert world.now == 1000


def test_every_provider_s_row_says_its_workspace(monkeypatch):
    """Without a GPU: the clock and the counters are stand-ins."""
    seconds = {"fused": 2.0, "eager": 1.0, "copy": 4.0, "copy alike": 8.0}
    asked = []

    def take_turns(calls, rounds, clock):
        asked.append((set(calls), rounds))
        return {name: Turns(valid_s=[seconds[name] - 0.01, seconds[name] + 0.01]) for name in calls}

    for name, stand_in in (
        ("CudaClock", lambda device: None),
        ("take_turns", take_turns),
        ("add_host_times", lambda *_: None),
        ("workspace_bytes", lambda call: len(call.forward()[0])),
    ):
        monkeypatch.setattr(bench_kernels, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_kernels, "GIB", 64)
    eager = norm_case(None).providers["eager"]()
    case = replace(norm_case(eager), dtype=torch.float32, bytes_forward=100, bytes_backward=100)
    cpu = torch.device("cpu")
    row = bench_kernels.bench_case(case, cpu, replace(QUICK, compile=False), bench_kernels.Copies(cpu))
    assert {name: rates["workspace_bytes"] for name, rates in row["providers"].items()} == {
        "fused": 12,
        "eager": 12,
    }
    assert row["copy_bytes_per_s"] == 2 * 64 / 4.0 and row["copy_alike_bytes_per_s"] == 100 / 8.0
    fused = row["providers"]["fused"]
    assert fused["forward_share_of_copy"] == 100 / 2.0 / 32 and fused["both_share_of_copy"] == 200 / 2.0 / 32
    assert 0 < fused["forward_error_s"] == fused["both_error_s"] < 0.02
    assert row["ahead"] == {"forward": ["eager"], "both": ["eager"]}
    assert asked == [(set(seconds), QUICK.rounds)] * 2, "the copies are among those of both passes"
    assert QUICK.rounds_of(replace(case, flops=1)) == QUICK.rounds // 3
    row = bench_kernels.bench_case(
        replace(case, flops=1), cpu, replace(QUICK, compile=False), bench_kernels.Copies(cpu)
    )
    assert row["ahead"] == {"both": ["eager"]}, "a head and loss may make gradients in forward"


def test_copies_move_what_the_operator_moves(monkeypatch):
    """One of 1 GiB, one as small as a forward, which is no larger than the first."""
    monkeypatch.setattr(bench_kernels, "GIB", 64)
    copies = bench_kernels.Copies(torch.device("cpu"))
    for num_bytes, moved in ((20, 10), (21, 10), (1000, 64)):
        for name, size in (("copy", 64), ("copy alike", moved)):
            copies._source.fill_(1)
            copies._target.zero_()
            copies.calls(num_bytes)[name]()
            assert int(copies._target.sum()) == size


def test_a_library_that_breaks_is_said_so_beside_the_others():
    def breaks():
        raise RuntimeError("no such card\nand a long trace")

    def missing():
        raise ImportError("No module named 'quack'")

    case = norm_case(None)
    case = replace(case, providers={**case.providers, "liger": breaks, "quack": missing})
    found, errors = _load(case, replace(QUICK, compile=False))
    assert list(found) == ["fused", "eager"]
    assert errors == {
        "liger": "RuntimeError: no such card",
        "quack": "not installed: No module named 'quack'",
    }


def test_adapted_inputs_are_the_same_numbers():
    """Where a library's kernel wants another layout, the copy into it is not timed."""
    geglu = cases_of(["bias_geglu"])[0]
    x = torch.randn(3, 8, requires_grad=True)
    gate, up = geglu.inputs_of("liger", (x,))
    assert torch.equal(torch.cat((gate, up), dim=1), x) and gate.is_leaf and gate.is_contiguous()
    assert geglu.inputs_of("fused", (x,))[0] is x
    merged, _, apart = cases_of(["rotary"])
    S, B, D = 3, 2, 128
    cos, sin = torch.randn(2, S, D // 2)
    qkv = torch.randn(S, B, 48 * D, requires_grad=True)
    (whole, *_) = merged.inputs_of("quack", (qkv, cos, sin))
    assert torch.equal(whole.transpose(0, 1), qkv) and whole.is_contiguous() and whole.is_leaf
    heads = [torch.randn(S, B, count, D, requires_grad=True) for count in (32, 8)]
    q, k, cos_1, _ = apart.inputs_of("liger", (*heads, cos, sin))
    for found, wanted in zip((q, k), heads, strict=True):
        assert torch.equal(found.permute(2, 0, 1, 3), wanted) and found.transpose(1, 2).is_contiguous()
    assert torch.equal(cos_1[0], cos) and all(x.is_leaf and x.requires_grad for x in (q, k))
    assert merged.inputs_of("quack", cut((qkv, cos, sin), 0))[0].numel() == 0
    assert apart.inputs_of("liger", cut((*heads, cos, sin), 0))[0].numel() == 0


class TurnInPlace(torch.autograd.Function):
    """A library's rotation, of its first argument's heads up to `turned`, and of their gradient."""

    @staticmethod
    def forward(ctx, x, turned, cos, sin):
        ctx.turned, ctx.table = turned, (cos, sin)
        return turn_heads_(x, turned, cos, sin)

    @staticmethod
    def backward(ctx, dx):
        cos, sin = ctx.table
        return turn_heads_(dx, ctx.turned, cos, -sin), None, None, None


def turn_heads_(x_BSND, turned, cos, sin):
    heads = x_BSND[:, :, :turned].detach()
    heads.copy_(rotary_reference(heads.transpose(0, 1), cos, sin, None, False).transpose(0, 1))
    return x_BSND


def install_libraries(monkeypatch):
    """liger's and quack's entry points, as they are called, in plain PyTorch."""

    def quack(qkv, cos, sin, *, num_heads_q, headdim):
        heads = qkv.view(*qkv.shape[:2], -1, headdim)
        turned = heads.shape[2] - (heads.shape[2] - num_heads_q) // 2
        return TurnInPlace.apply(heads, turned, cos, sin).view(qkv.shape)

    def liger(q, k, cos, sin, _ids, _dim, head_dim):
        assert 2 * cos.shape[-1] == head_dim
        turn = lambda x: TurnInPlace.apply(x.transpose(1, 2), x.shape[1], cos[0], sin[0]).transpose(1, 2)  # noqa: E731
        return turn(q), turn(k)

    entries = {
        "quack.rotary": {"apply_rotary_emb_qkv_": quack},
        "liger_kernel.ops.rope": {"LigerRopeFunction": SimpleNamespace(apply=liger)},
    }
    for name, entry in entries.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(entry)


def _run_rotary(case, name, grads):
    """What a provider returns, heads after positions, and the gradients it makes of these."""
    inputs = case.inputs_of(name, draw(case, torch.device("cpu")))
    outputs = case.providers[name]()(*inputs)
    if name != "eager":  # the libraries have samples first
        outputs = [out.transpose(0, 1) for out in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    results = [out.detach().clone() for out in outputs]
    return results, torch.autograd.grad(outputs, leaves, [grad.clone() for grad in grads])


def test_quack_s_rotary_is_sent_what_attention_sends(monkeypatch):
    """Three results and three gradients, of which it makes the projection's one as Redline does."""
    install_libraries(monkeypatch)
    case = replace(rotary_bench._case(5, 2, 4, 2, 8), dtype=torch.float32)
    grads = [torch.randn(5, 2, heads, 8) for heads in (4, 2, 2)]
    results, (dqkv,) = _run_rotary(case, "quack", grads)
    wanted, (dqkv_wanted,) = _run_rotary(case, "eager", grads)
    for got, want in zip((*results, dqkv.transpose(0, 1)), (*wanted, dqkv_wanted), strict=True):
        torch.testing.assert_close(got, want)


def test_liger_s_rotary_does_what_redline_s_does_where_q_and_k_are_apart(monkeypatch):
    install_libraries(monkeypatch)
    case = replace(rotary_bench._apart(5, 2, 4, 2, 8), dtype=torch.float32)
    grads = [torch.randn(5, 2, heads, 8) for heads in (4, 2)]
    results, gradients = _run_rotary(case, "liger", grads)
    wanted, gradients_wanted = _run_rotary(case, "eager", grads)
    turned = [grad.permute(2, 0, 1, 3) for grad in gradients]
    for got, want in zip((*results, *turned), (*wanted, *gradients_wanted), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "kernels", "--quick"]) == 2
    assert "timing kernels needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["bench", "kernels", "--only", "rms_nrm"]) == 2
    assert "did you mean rms_norm" in capsys.readouterr().err


def test_the_table():
    gate = {"passed": True, "worst": 0.9, "where": "output 0", "against": "float64"}
    rates = {
        "forward_s": 3.21e-5,
        "forward_bytes_per_s": 4.1e12,
        "forward_share_of_copy": 0.96,
        "host_s": 2e-5,
    }
    providers = {
        "fused": rates,
        "eager": {**rates, "forward_s": 9e-5, "late_samples": 12, "late": ["forward", "both"]},
        "quack": {"error": "not installed: quack"},
    }
    heads = {
        by: {**rates, "flops_per_s": 1e14, "workspace_bytes": held}
        for by, held in (("fused", 3 << 29), ("liger", 1 << 26))
    }
    rows = [
        {"op": "rms_norm", "case": "16 x 4", "gate": gate, "providers": providers},
        {
            "op": "loss",
            "case": "8 x 4",
            "gate": gate,
            "providers": heads,
            "ahead": {"forward": ["liger", "quack"], "both": []},
        },
        {"op": "rotary", "case": "8 x 2", "gate": {**gate, "passed": False, "worst": 3.0}, "providers": {}},
    ]
    out = io.StringIO()
    print_kernels(rows, Console(file=out, width=150))
    for part in (
        "rms_norm 16 x 4",
        "   32 ",
        "96%",
        "   20 ",
        "quack: not installed: quack",
        "rms_norm 16 x 4: the host was late in every sample of eager's forward and both",
        "rotary 8 x 2: output 0 has 3.00 times",
        "loss 8 x 4: ahead of fused, forward: liger, quack\n",
        "loss 8 x 4: most memory beyond the inputs: fused 1.50 GiB, liger 64.00 MiB",
    ):
        assert part in out.getvalue(), part
    assert "ahead of fused, both" not in out.getvalue()
    assert not all_passed(rows) and all_passed(rows[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timings_on_a_gpu():
    from redline.bench.kernels import bench_kernels

    (row,) = bench_kernels(["rms_norm"], QUICK, lambda _: None)
    assert row["copy_alike_bytes_per_s"] < 1.1 * row["copy_bytes_per_s"]
    fused = row["providers"]["fused"]
    assert row["gate"]["passed"] and 0 < fused["forward_s"] < fused["both_s"] < 0.1
    assert 0.1 < fused["forward_share_of_copy"] < 1.3 and 0 < fused["host_s"] < 1e-3
    x_bytes = 2 * 16384 * 4096
    assert 2 * x_bytes <= fused["workspace_bytes"] < 3 * x_bytes, "its result, its gradient, and a little"
    assert fused["late"] == [] and fused["late_samples"] >= 0
