"""Buckets and shards on one process, over transports that count, or take their time."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from redline.comm import Done
from redline.formulas.buckets import ALIGNMENT, BucketRule, cut_buckets, shard_of
from redline.formulas.traffic import data_parallel_collectives
from redline.optim import AdamOptions, DataParallel, FlatBuffers, Optimizer, Sharding
from redline.optim.gather import ParamGatherer
from redline.optim.pieces import Pieces, rectangles
from redline.optim.reduce import GradReducer

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

from link import Link, hidden


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    bucket=st.one_of(st.none(), st.integers(1, 5000)),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
)
def test_buckets_hold_every_parameter_once_and_cut_into_equal_aligned_shards(
    sizes: list[int], bucket: int | None, ranks: int
) -> None:
    layout = cut_buckets(sizes, BucketRule(size=bucket, ranks=ranks))
    assert layout.buckets[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(layout.buckets, layout.buckets[1:], strict=False))
    for start, size in zip(layout.starts, sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert size == 0 or any(low <= start and start + size <= high for low, high in layout.buckets)
    for low, high in layout.buckets:
        shards = [shard_of((low, high), ranks, index) for index in range(ranks)]
        assert shards[0][0] == low and shards[-1][1] == high
        assert all(start % ALIGNMENT == 0 for start, _ in shards)
        assert ranks == 1 or (high - low) % 128 == 0
    if bucket is not None:
        assert all(high - low >= bucket for low, high in layout.buckets[:-1]), "closed too early"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 7), data=st.data())
def test_a_flat_range_is_at_most_three_rectangles(rows: int, columns: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows * columns - 1))
    end = data.draw(st.integers(start + 1, rows * columns))
    whole = torch.arange(rows * columns)
    boxes = list(rectangles((rows, columns), start, end))
    assert len(boxes) <= 3
    own = Pieces(torch.Size([rows, columns]), whole.dtype, ((start, whole[start:end]),))
    found = torch.full((rows, columns), -1)
    for offset, piece in own.rectangles():
        found[tuple(slice(a, a + n) for a, n in zip(offset, piece.shape, strict=True))] = piece
    assert torch.equal(found.flatten()[start:end], whole[start:end]) and (found >= 0).sum() == end - start


@dataclass
class Counting:
    """Sends nothing to nobody, and counts."""

    size: int = 2
    index: int = 0
    sent: list[tuple[str, int]] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor) -> Done:
        return self._note("all_reduce", tensor)

    def reduce_scatter(self, tensor: Tensor) -> Done:
        return self._note("reduce_scatter", tensor)

    def all_gather(self, tensor: Tensor) -> Done:
        return self._note("all_gather", tensor)

    def can_follow(self, first: Any) -> bool:
        return bool(first.is_completed())

    def all_reduce_after(self, first: Any, tensor: Tensor) -> Done:
        first.wait()
        return self.all_reduce(tensor)

    def _note(self, kind: str, tensor: Tensor) -> Done:
        self.sent.append((kind, tensor.nbytes))
        return Done()


def made(
    transport: Any, *, states: bool, overlap: bool = True, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(24, 24, dtype=dtype) for _ in range(5)])
    sharding = Sharding(rule=BucketRule(size=1000, ranks=transport.size), states=states)
    buffers = FlatBuffers(
        module.named_parameters(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu",
        sharding=sharding,
    )  # fmt: skip
    ranks = DataParallel(buffers, transport, overlap_reduce=overlap, overlap_gather=overlap, **more)
    return module, Optimizer(buffers, adam=AdamOptions(), ranks=ranks)


def step(module: nn.Module, optimizer: Optimizer, microbatches: int = 2) -> None:
    optimizer.buffers.zero_grad()
    for number in range(microbatches):
        if number == microbatches - 1:
            optimizer.ranks.reducer.expect_last_backward()
        module(torch.randn(3, 24, dtype=next(module.parameters()).dtype)).square().mean().backward()
    optimizer.ranks.reducer.finish()
    optimizer.step(0.1, 0.1)
    optimizer.settle()


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_is_what_the_formula_says(
    states: bool, overlap: bool, instances: int, dtype: torch.dtype
) -> None:
    """Collectives and their bytes, whether they overlap or not, step after step."""
    transport, replica = Counting(), Counting(size=instances)
    module, optimizer = made(transport, states=states, overlap=overlap, dtype=dtype, replica=replica)
    (buffer,) = optimizer.buffers.buffers
    assert len(buffer.buckets) > 1
    expected = data_parallel_collectives(
        [end - start for start, end in buffer.buckets],
        transport.size,
        sharded=states,
        instances=instances,
        grad_bytes=4,
        param_bytes=dtype.itemsize,
    )
    for _ in range(3):
        transport.sent.clear()
        replica.sent.clear()
        step(module, optimizer)
        assert sorted(transport.sent + replica.sent) == sorted(expected)


def test_a_shard_holds_what_the_formula_says() -> None:
    """bf16 with fp32 gradients: 6 bytes a parameter and 12 over the ranks."""
    _, optimizer = made(Counting(size=4), states=True, dtype=torch.bfloat16)
    buffers = optimizer.buffers
    (buffer,) = buffers.buffers
    elements = buffer.tensors["param"].numel()
    own = sum(
        shard.tensors[kind].nbytes
        for shard in buffers.shards
        for kind in ("main_param", "exp_avg", "exp_avg_sq")
    )
    assert buffer.tensors.keys() == {"param", "main_grad"}
    assert sum(each.nbytes for each in buffer.tensors.values()) == 6 * elements and own == 12 * elements // 4


def test_a_bucket_goes_when_its_last_gradient_is_there_and_only_in_the_last_microbatch() -> None:
    """The first step counts firings; then buckets go during the backward pass, in their order."""
    transport = Counting()
    module, optimizer = made(transport, states=True)
    reducer = optimizer.ranks.reducer
    seen: list[tuple[int, int]] = []
    for number, layer in enumerate(module):
        layer.register_full_backward_hook(
            lambda *_, number=number: seen.append((number, len(transport.sent)))
        )
    step(module, optimizer)
    transport.sent.clear()
    seen.clear()
    step(module, optimizer)
    assert all(count == 0 for _, count in seen[:5]), "the first microbatch sends nothing"
    assert seen[-1][1] > 0, "the last one sends while it runs"
    assert len(reducer.buckets) == sum(kind == "reduce_scatter" for kind, _ in transport.sent)


def test_buckets_of_several_buffers_go_in_the_order_of_the_model() -> None:
    """Weights in one dtype, norms and embedding in another: no layer waits for the embedding's gradient."""
    parts = {"embedding": nn.Embedding(50, 8, dtype=torch.bfloat16)}
    for layer in range(3):
        parts[f"layers_{layer}_norm"] = nn.LayerNorm(8, dtype=torch.bfloat16)
        parts[f"layers_{layer}_fc"] = nn.Linear(8, 64)
    module = nn.ModuleDict(parts)
    buffers = FlatBuffers(
        module.named_parameters(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu",
        sharding=Sharding(rule=BucketRule(size=400, ranks=2), states=True),
    )  # fmt: skip
    assert len(buffers.buffers) == 2
    first = buffers.first_use
    link = Counting()
    reducer = GradReducer(buffers, link, link, scatter=True, overlap=False)
    places = [first(bucket.names) for bucket in reducer.buckets]
    assert places == sorted(places, reverse=True) and len(set(places)) == len(places) >= 4
    gatherer = ParamGatherer(buffers, link, overlap=True)
    read = [first(bucket.names) for bucket in gatherer.buckets]
    assert read == places[::-1] and "embedding.weight" in gatherer.buckets[0].names


def test_b058_a_parameter_without_gradient_and_a_frozen_one() -> None:
    """Its bucket goes at the end of the backward pass; frozen ones are in none."""
    transport = Counting()
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {"used": nn.Linear(24, 24), "unused": nn.Linear(24, 24), "frozen": nn.Linear(24, 24)}
    )
    module["frozen"].requires_grad_(False)
    buffers = FlatBuffers(
        module.named_parameters(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu",
        sharding=Sharding(rule=BucketRule(size=500, ranks=2), states=True),
    )  # fmt: skip
    optimizer = Optimizer(
        buffers, adam=AdamOptions(), ranks=DataParallel(buffers, transport, overlap_reduce=True)
    )
    before = module["frozen"].weight.clone()
    for _ in range(3):
        transport.sent.clear()
        buffers.zero_grad()
        optimizer.ranks.reducer.expect_last_backward()
        module["frozen"](module["used"](torch.randn(2, 24))).square().mean().backward()
        optimizer.ranks.reducer.finish()
        optimizer.step(0.1, 0.1)
        reduced = [size for kind, size in transport.sent if kind == "reduce_scatter"]
        trainable = next(buffer for buffer in buffers.buffers if buffer.trainable)
        assert sum(reduced) == trainable.tensors["main_grad"].nbytes
    assert torch.equal(module["frozen"].weight, before)


# Overlap, measured on a transport of fixed speed beside a simulation of the same schedule.

LAYER_S, BYTES_S = 0.03, 24 * 24 * 4 / 0.02  # a layer's backward; its gradient takes two thirds of that


class Sending(Counting):
    """Collectives over a link of fixed speed."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(size)
        self._link = Link(BYTES_S)
        self.intervals = self._link.intervals

    def _note(self, kind: str, tensor: Tensor) -> Any:
        return self._link.send(tensor.nbytes)


class Slow(torch.autograd.Function):
    """A site: its backward takes a while, adds to `main_grad` by itself and hands autograd None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return x + weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(LAYER_S)
        ctx.main_grad += 1
        return dy, None, None


def hidden_in_backward(overlap: bool, instances: int = 1) -> tuple[float, float]:
    """Of a second step's backward pass: seconds of sending inside an instance, and across instances."""
    link, across = Sending(), Sending(instances)
    weights = nn.ParameterDict({str(number): nn.Parameter(torch.zeros(24, 24)) for number in range(8)})
    buffers = FlatBuffers(
        weights.named_parameters(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu",
        sharding=Sharding(rule=BucketRule(size=24 * 24, ranks=2), states=True),
    )  # fmt: skip
    reducer = DataParallel(buffers, link, across, overlap_reduce=overlap).reducer
    for _ in range(2):
        link.intervals.clear()
        across.intervals.clear()
        x = torch.zeros(2, requires_grad=True)
        y = x
        for weight in weights.values():
            y = Slow.apply(y, weight, weight.main_grad)
        reducer.expect_last_backward()
        start = time.perf_counter()
        y.sum().backward()
        end = time.perf_counter()
        reducer.finish()
    assert len(across.intervals) == (8 if instances > 1 else 0)
    assert all(inside[1] <= after[0] for inside, after in zip(link.intervals, across.intervals, strict=False))
    return hidden([(start, end)], link.intervals), hidden([(start, end)], across.intervals)


def test_overlap_hides_nine_tenths_of_what_the_schedule_allows() -> None:
    """And without the flag nothing is hidden: the intervals of sending and computing do not meet."""
    padded = cut_buckets([24 * 24], BucketRule(size=24 * 24, ranks=2)).size
    took = 4 * padded / BYTES_S
    free, allowed = 0.0, 0.0
    for layer in range(8):  # each goes when its layer is done and the link is free
        begin = max(free, (layer + 1) * LAYER_S)
        free = begin + took
        allowed += max(0.0, min(free, 8 * LAYER_S) - begin)
    best = max(hidden_in_backward(overlap=True)[0] for _ in range(3))  # a busy machine only delays
    print(f"hidden: {best:.3f} s measured, {allowed:.3f} s simulated, of {8 * took:.3f} s sent")
    assert best >= 0.9 * allowed > 0.5 * 8 * took
    assert hidden_in_backward(overlap=False) == (0.0, 0.0)


def test_sums_across_instances_hide_nine_tenths_of_what_the_schedule_allows() -> None:
    """A bucket summed inside goes across when the next gradient is there; without the flag after backward."""
    padded = cut_buckets([24 * 24], BucketRule(size=24 * 24, ranks=2)).size
    inside_s = 4 * padded / BYTES_S
    free, free_across, allowed = 0.0, 0.0, 0.0
    for layer in range(8):
        free = max(free, (layer + 1) * LAYER_S) + inside_s
        seen = math.ceil(free / LAYER_S - 1e-9) * LAYER_S
        begin = max(free_across, seen)
        free_across = begin + inside_s / 2  # the own part alone
        allowed += max(0.0, min(free_across, 8 * LAYER_S) - begin)
    best = max((hidden_in_backward(overlap=True, instances=2) for _ in range(3)), key=lambda each: each[1])
    print(f"hidden across: {best[1]:.3f} s measured, {allowed:.3f} s simulated, of {4 * inside_s:.3f} s sent")
    assert best[1] >= 0.9 * allowed > 0.6 * 4 * inside_s
    assert best[0] > 0.5 * 8 * inside_s, "what is sent inside is hidden as before"
    assert hidden_in_backward(overlap=False, instances=2) == (0.0, 0.0)


def test_buckets_go_across_in_their_order_whenever_they_are_summed() -> None:
    """Ranks must agree on the order of a group's collectives, and see different buckets end first."""

    @dataclass
    class Late(Done):
        over: bool = False

        def is_completed(self) -> bool:
            return self.over

    works = [Late(), Late(over=True), Late()]
    across, replica = list[float](), Counting()
    _, optimizer = made(Counting(), states=True, replica=replica)
    reducer = optimizer.ranks.reducer
    replica._note = lambda kind, tensor: across.append(tensor[0].item()) or Done()  # type: ignore[method-assign]
    reducer._shard = mock.Mock(reduce_scatter=mock.Mock(side_effect=works))
    reducer.expect_last_backward()
    for number, bucket in enumerate(reducer.buckets):
        bucket.grads.fill_(number)
        reducer._send(bucket)
    assert across == [], "the first is under way, so the second waits, although it has ended"
    works[0].over = True
    reducer._follow()
    assert across == [0, 1]
    works[2].over = True
    reducer._follow()
    assert across == [0, 1, 2]


def hidden_in_forward(overlap: bool) -> float:
    """Of the forward pass after an update, while layers are computed."""
    link = Sending()
    layers = [(f"layers.{number}.weight", nn.Parameter(torch.zeros(24, 24))) for number in range(8)]
    buffers = FlatBuffers(
        layers, main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu",
        sharding=Sharding(rule=BucketRule(size=24 * 24, ranks=2), states=True),
    )  # fmt: skip
    gatherer = DataParallel(buffers, link, overlap_reduce=True, overlap_gather=overlap).gatherer
    assert len(gatherer.buckets) == len(layers)
    gatherer.start()
    computed = []
    for number in range(len(layers)):
        gatherer.before(f"layers.{number}")
        start = time.perf_counter()
        assert len(link.intervals) > number, "its parameters are still on their way"
        time.sleep(LAYER_S)
        computed.append((start, time.perf_counter()))
    gatherer.finish()
    return hidden(computed, link.intervals)


def test_gathers_hide_behind_nine_tenths_of_the_forward_pass_that_the_schedule_allows() -> None:
    """All but the first layer's parameters arrive while layers are computed; without the flag none do."""
    took = 4 * cut_buckets([24 * 24], BucketRule(size=24 * 24, ranks=2)).size / BYTES_S
    assert took < LAYER_S, "so that no layer but the first waits"
    allowed = 7 * took
    best = max(hidden_in_forward(overlap=True) for _ in range(3))
    print(f"hidden: {best:.3f} s measured, {allowed:.3f} s simulated, of {8 * took:.3f} s sent")
    assert best >= 0.9 * allowed
    assert hidden_in_forward(overlap=False) == 0.0
