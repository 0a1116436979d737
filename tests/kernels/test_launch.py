"""A repeated launch finds its compiled kernel; anything that could need another one goes through Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from redline.kernels import launch
from redline.kernels.rms_norm import rms_norm
from redline.kernels.rms_norm.reference import rms_norm_reference


class Compiled:
    """Stands for Triton's compiled kernel: notes the launches made through it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches, self.watched = [], []

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (stream, function, metadata) == (70, self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)  # no metadata for hooks, no hooks
        self.launches.append(((x, y, z), rest[3:]))

    def __getitem__(self, grid):
        return lambda *args: self.watched.append((grid, args))


class Kernel:
    """Stands for a @triton.jit function of (x_ptr, n, scale, BLOCK, FLAG)."""

    arg_names = ("x_ptr", "n", "scale", "BLOCK", "FLAG")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self):
        self.compiled, self.dispatches = Compiled(), 0

    def __getitem__(self, grid):
        def run(*args, **named):
            self.dispatches += 1
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(launch, "stream_of", lambda device: 71 + device)  # -1: these tensors are on the CPU
    return Kernel()


def test_a_known_call_is_launched_with_all_arguments_in_place(kernel):
    launchable, x = launch.Launchable(kernel), torch.empty(32)
    for _ in range(3):
        launchable[(7,)](x, 32, 0.5, FLAG=True, BLOCK=64, num_warps=4)
    assert kernel.dispatches == 1
    assert kernel.compiled.launches == [((7, 1, 1), (x, 32, 0.5, 64, True))] * 2
    launchable[(9, 2)](x, 32, 0.5, FLAG=True, BLOCK=64, num_warps=4)  # the grid is no part of the form
    assert kernel.compiled.launches[-1][0] == (9, 2, 1) and kernel.dispatches == 1


def test_whoever_hangs_a_hook_hears_of_every_launch(kernel, monkeypatch):
    launchable, x = launch.Launchable(kernel), torch.empty(32)
    launchable[(7,)](x, 32, 0.5, 64, True)
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(launch.knobs.runtime, hook)
        monkeypatch.setattr(chain, "calls", [print])
        launchable[(7,)](x, 32, 0.5, 64, True)
        monkeypatch.setattr(chain, "calls", [])
    assert kernel.compiled.watched == [((7, 1, 1), (x, 32, 0.5, 64, True))] * 2
    assert not kernel.compiled.launches and kernel.dispatches == 1


def test_what_may_need_another_form_goes_through_triton(kernel):
    launchable, x = launch.Launchable(kernel), torch.empty(32)
    launchable[(1,)](x, 32, 0.5, BLOCK=64, FLAG=True)
    for args, named in (
        ((x[1:], 32, 0.5), {"BLOCK": 64, "FLAG": True}),  # not aligned to 16 bytes
        ((x.half(), 32, 0.5), {"BLOCK": 64, "FLAG": True}),
        ((x, 31, 0.5), {"BLOCK": 64, "FLAG": True}),
        ((x, 32, 0.5), {"BLOCK": 32, "FLAG": True}),
        ((x, 32, 0.5), {"BLOCK": 64, "FLAG": True, "num_warps": 8}),
        ((x, None, 0.5), {"BLOCK": 64, "FLAG": True}),
    ):
        before = kernel.dispatches
        launchable[(1,)](*args, **named)
        assert kernel.dispatches == before + 1
    assert not kernel.compiled.launches
    launchable[(1,)](x[4:], 32, 0.5, BLOCK=64, FLAG=True)  # another tensor, as aligned as the first
    assert len(kernel.compiled.launches) == 1


def test_arguments_by_name_that_are_no_constants_are_not_remembered(kernel):
    launchable, x = launch.Launchable(kernel), torch.empty(32)
    for _ in range(2):
        launchable[(1,)](x, 32, scale=0.5, BLOCK=64, FLAG=True)
    assert kernel.dispatches == 2 and not kernel.compiled.launches


def test_it_forgets_before_it_fills_the_memory(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST_CALLS", 3)
    launchable, x = launch.Launchable(kernel), torch.empty(32)
    for n in (1, 2, 3, 4, 4, 1):
        launchable[(1,)](x, n, 0.5, 64, True)
    assert kernel.dispatches == 5  # 1 was forgotten


def test_alignment_that_changes_between_calls(device):
    """The form compiled for aligned rows must not run on rows that start elsewhere."""
    flat = torch.randn(8 * 64 + 1, device=device)
    weight = torch.rand(64, device=device)
    for start in (0, 1, 0, 1):
        x = flat[start : start + 8 * 64].view(8, 64)
        got = rms_norm(x, weight, impl="triton")
        torch.testing.assert_close(got, rms_norm_reference(x, weight, 1e-5), rtol=1e-5, atol=1e-5)


def test_the_installed_triton_gets_the_same_launch_twice():
    """Triton's internals are no promise: its own dispatch and the short way must hand the driver the same."""
    script = Path(__file__).with_name("launch_on_triton.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
