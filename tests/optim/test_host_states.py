"""Optimizer states in host memory: the same bits as on the device, however they are cut and stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from redline.formulas.buckets import BucketRule
from redline.optim import AdamOptions, Away, FlatBuffers, Optimizer, Sharding
from redline.optim.buffer import TOPS

SIZES = {
    "embedding.word.weight": (37, 9),
    "layers.0.fc1.weight": (50, 11),
    "norm.weight": (70,),
    "e.weight": (0, 3),
}
BF16, CODES = torch.bfloat16, torch.uint8
STORAGES = {  # parameter, moments, remainder
    "fp32": (torch.float32, None, False),
    "bf16": (BF16, None, False),
    "remainder": (BF16, BF16, True),
    "8 bits": (BF16, CODES, True),
}


class Trained:
    """A few steps on random gradients."""

    def __init__(self, storage, device, away=None, *, impl="fused", overlap=True, sharding=None, steps=4):
        dtype, moments, remainder = STORAGES[storage]
        gen = torch.Generator().manual_seed(0)
        named = [
            (name, nn.Parameter(torch.randn(size, generator=gen).to(dtype))) for name, size in SIZES.items()
        ]
        self.buffers = FlatBuffers(
            named, main_dtype=torch.float32, grad_dtype=torch.float32, exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments, remainder=remainder, device=device, away=away, sharding=sharding,
        )  # fmt: skip
        adam = AdamOptions(beta2=0.95, impl=impl)
        self.optimizer = Optimizer(self.buffers, adam=adam, overlap_away=overlap, nonfinite_action="skip")
        self.gen = gen
        self.take(steps)

    def take(self, steps, bad=False):
        for _ in range(steps):
            for flat in self.buffers.views("main_grad").values():
                flat.copy_(torch.randn(flat.shape, generator=self.gen))
                if bad and flat.numel():
                    flat.view(-1)[-1] = torch.nan
            self.optimizer.step(1e-2, 0.1, decoupled_lr=3e-3)
        return self

    def whole(self, kind):
        """Every parameter's numbers of a kind, wherever they are."""
        found = {name: view.detach().cpu().clone() for name, view in self.buffers.views(kind).items()}
        for name, pieces in self.buffers.pieces(kind).items():
            found[name] = torch.full(pieces.shape, torch.nan, dtype=pieces.dtype)
            for start, part in pieces.parts:
                found[name].view(-1)[start : start + len(part)] = part.cpu()
        return found


def assert_same(left, right):
    for kind in ("param", "main_param", "exp_avg", "exp_avg_sq"):
        a, b = left.whole(kind), right.whole(kind)
        assert a.keys() == b.keys() == SIZES.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), kind


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_bits_as_on_the_device(storage, share, overlap, device):
    """Chunks of 192 elements, that cut parameters anywhere; a skipped step, too, changes nothing."""
    away = Away(share=share, chunk=192)
    there, here = Trained(storage, device, away, overlap=overlap), Trained(storage, device)
    assert_same(there, here)
    for run in (there, here):
        run.take(1, bad=True)
        assert run.optimizer.skipped_steps == 1
    assert_same(there, here)
    assert_same(there.take(2), here.take(2))
    assert there.optimizer.params_norm() == pytest.approx(here.optimizer.params_norm(), rel=1e-6)


@pytest.mark.parametrize("storage", ["bf16", "8 bits"])
def test_the_same_bits_by_the_kernel(storage, kernel_device):
    away = Away(share=0.7, chunk=256)
    there = Trained(storage, kernel_device, away, impl="triton", steps=2)
    assert there.optimizer.adam.ran == "triton"
    assert_same(there, Trained(storage, kernel_device, impl="triton", steps=2))


def test_what_is_away_and_what_is_here(device):
    """Exactly the share, in chunks, in pinned memory; on the device two stages of one chunk."""
    run = Trained("bf16", device, Away(share=0.5, chunk=192), steps=0)
    size = run.buffers.flat("param")[0].numel()
    away = [shard for shard in run.buffers.shards if shard.away]
    bounds = sorted(shard.range for shard in run.buffers.shards)
    assert bounds[0][0] == 0 and bounds[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(bounds))
    border = round(size / 128) * 64
    assert sum(end - start for start, end in (shard.range for shard in away)) == border
    assert {end - start for start, end in (shard.range for shard in away)} == {
        192,
        round(size / 128) * 64 % 192,
    }
    for shard in away:
        for kind in ("main_param", "exp_avg", "exp_avg_sq"):
            held = shard.tensors[kind]
            assert held.device.type == "cpu" and held.is_pinned() == (device == "cuda")
        assert shard.tensors["param"].device.type == device
    assert run.optimizer.adam.away.stages_bytes == 2 * 192 * 12
    assert Trained("bf16", device, steps=0).optimizer.adam.away.stages_bytes == 0


def test_shards_of_a_distributed_optimizer(device):
    """Of its own part of each bucket a rank has a share in host memory."""
    sharding = Sharding(rule=BucketRule(size=300, ranks=2), index=1, states=True)
    # No ranks meet here: an optimizer of one rank would not do, but buffers and pieces are what counts.
    buffers = FlatBuffers(
        [("a.weight", nn.Parameter(torch.arange(660.0).view(66, 10).to(BF16)))],
        main_dtype=torch.float32, grad_dtype=torch.float32, device=device, sharding=sharding,
        away=Away(share=0.5, chunk=64),
    )  # fmt: skip
    for bucket in buffers.buffers[0].buckets:
        own = sharding.own(bucket)
        inside = [shard for shard in buffers.shards if own[0] <= shard.range[0] < own[1]]
        away = sum(shard.range[1] - shard.range[0] for shard in inside if shard.away)
        assert away == round((own[1] - own[0]) / 128) * 64
        assert sum(shard.range[1] - shard.range[0] for shard in inside) == own[1] - own[0]
    for start, part in buffers.pieces("main_param")["a.weight"].parts:
        assert torch.equal(part.cpu(), torch.arange(660.0).bfloat16().float()[start : start + len(part)])


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_moments_in_8_bits_are_written_back(share, device):
    """What a checkpoint read, whole or in pieces, is the state again, to the byte."""
    away = Away(share=share, chunk=192)
    source, target = Trained("8 bits", device, away), Trained("8 bits", device, away, steps=0)
    moments = {kind: source.whole(kind) for kind in TOPS}
    assert all(each.dtype == BF16 for found in moments.values() for each in found.values())
    for kind, name, values in target.buffers.write_moments():
        values.copy_(moments[kind][name])
    for kind in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in zip(target.buffers.shards, source.buffers.shards, strict=True):
            assert torch.equal(ours.tensors[kind], theirs.tensors[kind])
            used = theirs.tensors[kind].view(-1, 64).bool().any(1)
            assert torch.equal(ours.tensors[TOPS[kind]][used], theirs.tensors[TOPS[kind]][used])
