"""Which dtypes a run computes and stores in, by name."""

from __future__ import annotations

from redline.choice import Choice
from redline.config import PrecisionConfig
from redline.formulas.state import StateDtypes
from redline.hardware import Hardware

NAMES = ("bf16", "fp16", "fp32", "fp64")
AMPERE = (8, 0)  # the first NVIDIA generation with bf16 units


def choose_precision(precision: PrecisionConfig, hardware: Hardware) -> Choice:
    """The recipe that was asked for; else bf16 on a GPU that has it, fp16 on an older one, fp32 on a CPU."""
    asked = next((name for name in NAMES if getattr(precision, name)), None)
    if asked is not None:
        return Choice("precision", asked, asked, f"--{asked} was given")
    if hardware.kind == "cpu":
        return Choice("precision", "auto", "fp32", "a CPU computes fastest in fp32")
    capability = hardware.compute_capability
    if capability is not None and capability < AMPERE:
        return Choice("precision", "auto", "fp16", f"{hardware.name} has no bf16 units")
    return Choice("precision", "auto", "bf16", "a GPU's bf16 units need no loss scaling")


def state_dtypes(name: str, precision: PrecisionConfig) -> StateDtypes:
    """Storage of parameters, gradients and optimizer state under recipe `name`."""
    main = "fp64" if name == "fp64" else "fp32"
    grad = "bf16" if precision.grad_reduce_in_bf16 else main
    return StateDtypes(param=name, main=main, grad=grad, exp_avg=main, exp_avg_sq=main)
