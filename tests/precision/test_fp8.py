"""The scaling state: histories, renewal, what an Inf, a jump or a sea of zeros does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from redline.checkpoint import save_checkpoint
from redline.comm import Group
from redline.precision import Fp8Spec, Fp8State

SITE = "layers.0.mlp.fc1"


def state(**options) -> Fp8State:
    return Fp8State([SITE], Fp8Spec(**{"history_len": 4, **options}), "cpu")


def see(fp8: Fp8State, *largest: float) -> list[float]:
    """One step with each of these as the largest x; the scale of x after each."""
    scaling, scales = fp8.scaling(SITE, "x"), []
    for value in largest:
        scaling.amax.fill_(value)
        fp8.step()
        scales.append(scaling.scale.item())
    return scales


def test_scale_is_the_largest_finite_value_over_the_history():
    assert see(state(), 2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0) == [
        224.0,
        112.0,
        112.0,
        112.0,
        112.0,
        448.0,
        448.0,
    ]
    assert see(state(algo="most_recent"), 2.0, 4.0, 1.0) == [224.0, 112.0, 448.0]


def test_margin_halves_and_interval_waits():
    assert see(state(margin=2), 2.0) == [56.0]
    assert see(state(interval=2), 2.0, 4.0, 8.0, 8.0) == [224.0, 112.0, 112.0, 56.0]


def test_formats():
    hybrid, e4m3 = Fp8Spec(), Fp8Spec(format="e4m3")
    assert [hybrid.dtype(each) for each in ("x", "w", "dy")] == [torch.float8_e4m3fn] * 2 + [
        torch.float8_e5m2
    ]
    assert {e4m3.dtype(each) for each in ("x", "w", "dy")} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_leaves_scale_and_history_alone(bad):
    fp8 = state()
    assert see(fp8, 2.0, bad, bad) == [224.0] * 3
    assert fp8.history.isfinite().all()


def test_zeros_keep_the_scale_and_tiny_values_never_make_it_infinite():
    """B037."""
    assert see(state(algo="most_recent"), 0.0, 2.0, 0.0) == [1.0, 224.0, 224.0]
    assert see(state(), 1e-44)[0] == torch.finfo(torch.float32).max


def test_a_jump_saturates_is_seen_and_is_forgotten_after_the_history():
    fp8 = state()
    see(fp8, 1.0)
    fp8.scaling(SITE, "x").amax.fill_(1000.0)
    assert fp8.saturated().tolist() == [[True, False, False]]
    q, _, inverse = fp8.cast(torch.full((16, 16), 1000.0), fp8.scaling(SITE, "x"))
    assert torch.equal(q.float() * inverse, torch.ones(16, 16))  # cut off at what the scale was made for
    assert see(fp8, 1000.0, 1.0, 1.0, 1.0, 1.0) == [pytest.approx(0.448)] * 4 + [448.0]


@pytest.mark.parametrize("options", [{}, {"recipe": "tensorwise"}], ids=["delayed", "tensorwise"])
def test_an_evaluation_leaves_no_trace(options):
    fp8 = state(**options)
    for operand in ("x", "w", "dy"):
        fp8.cast(torch.full((16, 16), 3.0), fp8.scaling(SITE, operand))
    fp8.step()
    before = [tensor.clone() for tensor in (fp8.scale, fp8.inverse, fp8.amax, fp8.history)]
    fp8.keep_inputs()
    fp8.cast(torch.full((16, 16), 0.01), fp8.scaling(SITE, "x"))
    fp8.forget_inputs()
    assert all(map(torch.equal, before, (fp8.scale, fp8.inverse, fp8.amax, fp8.history)))


def test_the_first_step_measures_before_it_casts():
    fp8 = state()
    gradient = torch.full((16, 16), 1e-7)
    q, _, inverse = fp8.cast(gradient, fp8.scaling(SITE, "dy"))
    torch.testing.assert_close(q.float() * inverse, gradient, rtol=1e-6, atol=0)
    assert fp8.measures
    fp8.step()
    assert not fp8.measures and Fp8State([SITE], Fp8Spec(recipe="tensorwise"), "cpu").measures


def test_an_inverse_scale_outlives_the_next_cast():
    """Two microbatches in flight under tensorwise scaling: each keeps its own."""
    fp8 = state(recipe="tensorwise")
    scaling = fp8.scaling(SITE, "x")
    first = fp8.cast(torch.full((16, 16), 2.0), scaling)
    fp8.cast(torch.full((16, 16), 64.0), scaling)
    assert torch.equal(first[0].float() * first[2], torch.full((16, 16), 2.0))


def numbers(values: Any) -> int:
    """How many numbers and words there are in JSON values."""
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else None
    return 1 if inner is None else sum(map(numbers, inner))


def test_b041_a_checkpoint_does_not_grow_with_the_steps(tmp_path: Path):
    """After 10 and after 1,000 steps as many numbers, and files of the same size but for longer numbers."""
    fp8 = state(patience=3)
    counts, sizes = [], []
    for step in range(1, 1001):
        see(fp8, 1.0 + step % 7)
        if step in (10, 1000):
            values = fp8.values()
            save_checkpoint(tmp_path / str(step), step, fp8.tensors(), values, keep=None)
            counts.append((numbers(values), sum(tensor.numel() for tensor in fp8.tensors().values())))
            files = [path for path in (tmp_path / str(step)).rglob("*") if path.is_file()]
            sizes.append((len(files), sum(path.stat().st_size for path in files)))
    assert counts[0] == counts[1]
    longer = counts[0][0] * len(repr(1 / 3))  # bytes, if each number of a step were written at its longest
    assert sizes[0][0] == sizes[1][0] and abs(sizes[1][1] - sizes[0][1]) <= longer


def test_state_is_saved_whole():
    fp8, other = state(), state()
    see(fp8, 2.0, 4.0, 8.0)
    for name, tensor in other.tensors().items():
        tensor.copy_(fp8.tensors()[name])
    assert other.fits(fp8.values()) and not other.fits(None)
    for options in ({"history_len": 8}, {"format": "e4m3"}, {"margin": 1}, {"recipe": "blockwise"}):
        assert not state(**options).fits(fp8.values())
    other.load_values(fp8.values())
    assert other.worst_overshoot() == fp8.worst_overshoot() == (2.0, SITE, "x")
    assert see(other, 1.0, 1.0) == see(fp8, 1.0, 1.0)


def _share(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    fp8 = Fp8State([SITE], Fp8Spec(history_len=4), "cpu", Group((0, 1), rank, dist.group.WORLD))
    assert see(fp8, 2.0 if rank else 8.0) == [56.0]
    dist.destroy_process_group()


def test_ranks_share_their_largest_values(tmp_path):
    """B039: a scale follows from the maximum over all ranks that cast alike."""
    mp.spawn(_share, args=(str(tmp_path / "store"),), nprocs=2)


@pytest.mark.parametrize("at_once", [3, 1 << 24])
def test_the_table_counts_what_a_cast_loses(at_once, monkeypatch):
    """Cut off: more than rounding would lose (beyond 464 in E4M3). Lost: not 0 before, 0 after."""
    monkeypatch.setattr("redline.precision.fp8.LOOKED_AT", at_once)
    fp8 = state()
    see(fp8, 448.0)  # the scale of x is now 1
    values = [448.0, 464.0, 466.0, -500.0, 2.0**-10, 2.0**-11, 0.0, 2.0**-9] + [1.0] * 8
    for looks in (False, True):
        fp8.looks = looks
        q, _, _ = fp8.cast(torch.tensor([values]), fp8.scaling(SITE, "x"))
    assert q.float()[0, :8].tolist() == [448.0, 448.0, 448.0, -448.0, 0.0, 0.0, 0.0, 2.0**-9]
    assert fp8.table() == []
    fp8.step()
    (row,) = fp8.table()
    assert (row.site, row.operand, row.amax, row.scale) == (SITE, "x", 500.0, 1.0)
    assert (row.saturated, row.underflowed) == (2 / 16, 2 / 16)
    assert not fp8.looks


def test_the_worst_overshoot_is_named_once():
    fp8 = state()
    see(fp8, 2.0, 16.0, 1.0)
    assert fp8.worst_overshoot() == (8.0, SITE, "x")
    assert fp8.worst_overshoot()[0] == 0.0
    measured = state(recipe="tensorwise")
    see(measured, 2.0, 16.0)
    assert measured.worst_overshoot()[0] == 0.0  # nothing is cut off


def test_patience_counts_steps_in_a_row():
    fp8 = state(algo="most_recent", patience=2)
    see(fp8, 1.0, 4.0)
    assert fp8.impatient() == []
    see(fp8, 4.0, 16.0)
    assert fp8.impatient() == []
    see(fp8, torch.inf)
    assert fp8.impatient() == [(SITE, "x")]
