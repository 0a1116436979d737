"""What holds for every kernel room: its form, its import without Triton, its compilation for a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sm90_forms import KERNELS
from test_activations import ACTIVATIONS

import redline.kernels
from redline.config.flags import to_flag
from redline.formulas.operators import OPERATORS, OPT_IN
from redline.kernels.bench_case import BenchCase
from redline.plan.kernels import SWITCHES

ROOT = Path(redline.kernels.__file__).parent
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/op.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_room_states_its_bench_cases(room):
    """Each case names its room, counts bytes, and offers at least the kernel and the plain twin."""
    cases = importlib.import_module(f"redline.kernels.{room}.bench").CASES
    assert cases
    for case in cases:
        assert isinstance(case, BenchCase)
        assert case.op == room
        assert case.bytes_forward > 0 or case.flops > 0
        assert {"fused", "eager"} <= set(case.providers)


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"fp8"}))  # its casts run in GEMMs that compile refuses
def test_room_is_held_to_compile_whole(room):
    """torch.compile traces through each operator without a graph break: a test of the room says so."""
    name = "test_activations.py" if room in ACTIVATIONS else f"test_{room}.py"
    text = (Path(__file__).parent / name).read_text()
    assert "fullgraph=True" in text, f"{name} compiles nothing"


def test_the_page_names_every_operator_with_its_rooms_its_switch_and_its_twin():
    """No operator without a switch, no switch that does not switch it, no twin that does not exist."""
    lines = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| `\w+` \|", line)]
    quoted = [[re.findall(r"`([^`]*)`", cell) for cell in row] for row in rows]
    assert {room for row in quoted for room in row[1]} == set(ROOMS) - {"fp8"}
    options = {**SWITCHES, "fused_residual_rmsnorm": ("residual_norm",)}
    told: dict[str, set[str]] = {}
    for (operator,), _, _, switches, twins in quoted:
        flags = {flag.replace("[no-]", "") for flag in switches if not flag.endswith(" native")}
        told[operator] = {name for name in options if to_flag(name) in flags}
        assert len(told[operator]) == len(flags)
        for twin in twins:
            module, _, name = twin.rpartition(".")
            assert callable(getattr(importlib.import_module(f"redline.{module}"), name))
    held = {each: {name for name in options if each in options[name]} for each in OPERATORS | OPT_IN}
    assert told == held


def test_every_room_imports_without_triton():
    """On a machine without Triton every operator imports, and its reference runs."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        f"import importlib\nfor room in {ROOMS}: importlib.import_module('redline.kernels.' + room + '.op')\n"
        "import torch; from redline.kernels.rms_norm import rms_norm\n"
        "assert rms_norm(torch.ones(2, 4), torch.ones(4)).shape == (2, 4)\n"
        "assert 'torch._dynamo' not in sys.modules, 'importing the rooms costs the import of torch._dynamo'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_kernels_compile_for_hopper():
    """Without a GPU: ptxas accepts each kernel for sm_90, with 16-byte global accesses and without spilling.

    The interpreter takes much that the compiler does not, so this is what stands between an edit and the GPU.
    """
    if torch.cuda.is_available():
        pytest.skip("on a GPU the other tests compile the kernels")
    pytest.importorskip("triton", reason="the package triton is not installed")
    script = Path(__file__).parent / "sm90.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" ok") == len(KERNELS)
