"""Which dtypes a run computes and stores in, by name."""

from __future__ import annotations

from redline.choice import Choice
from redline.config import OptimConfig, PrecisionConfig, offloaded_share
from redline.formulas.state import StateDtypes
from redline.hardware import AMPERE, Hardware

NAMES = ("bf16", "fp16", "fp32", "fp64")


def choose_precision(precision: PrecisionConfig, hardware: Hardware) -> Choice:
    """The recipe that was asked for; else bf16 on a GPU that has it, fp16 on an older one, fp32 on a CPU."""
    asked = next((name for name in NAMES if getattr(precision, name)), None)
    if asked is not None:
        return Choice("precision", asked, asked, f"--{asked} was given")
    if precision.fp8_format is not None:
        return Choice("precision", "auto", "bf16", "fp8 GEMMs work beside bf16 activations")
    if hardware.kind == "cpu":
        return Choice("precision", "auto", "fp32", "a CPU computes fastest in fp32")
    capability = hardware.compute_capability
    if capability is not None and capability < AMPERE:
        return Choice("precision", "auto", "fp16", f"{hardware.name} has no bf16 units")
    return Choice("precision", "auto", "bf16", "a GPU's bf16 units need no loss scaling")


def storage_choice(name: str, optim: OptimConfig) -> tuple[Choice, ...]:
    """The record of `--use-precision-aware-optimizer` where parameters are no half of the main ones."""
    if not optim.use_precision_aware_optimizer or name == "bf16":
        return ()
    why = f"16 more bits make an fp32 main parameter of a bf16 one; those of {name} stay as they are"
    return (Choice("main-parameters", "a parameter and 16 more bits", "whole", why),)


def state_dtypes(name: str, precision: PrecisionConfig, optim: OptimConfig) -> StateDtypes:
    """Storage of parameters, gradients and optimizer state under recipe `name`."""
    main = "fp64" if name == "fp64" else "fp32"
    grad = "bf16" if precision.grad_reduce_in_bf16 or optim.main_grads_dtype == "bf16" else main
    moments = (optim.exp_avg_dtype, optim.exp_avg_sq_dtype)
    exp_avg, exp_avg_sq = (main if dtype == "fp32" else dtype for dtype in moments)
    return StateDtypes(
        param=name,
        main=main,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        remainder=optim.use_precision_aware_optimizer and name == "bf16",
        away=offloaded_share(optim),
        stages=1 + optim.overlap_cpu_optimizer_d2h_h2d,
    )
