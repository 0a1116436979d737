"""What only the machine and the kernel rooms know about whether fused operators can run a model."""

from __future__ import annotations

import torch

from redline.formulas.operators import Operator
from redline.kernels.common import why_not_interpreted, why_not_on
from redline.kernels.masked_softmax import op as masked_softmax
from redline.kernels.qk_norm import op as qk_norm
from redline.kernels.rms_norm import op as rms_norm
from redline.model import why_no_engine
from redline.plan import Conditions, Plan


def kernel_conditions(
    plan: Plan, device: torch.device, attention: str, *, engine: bool, interpret: bool
) -> Conditions:
    """Under which `choose_kernels` decides for this run.

    Args:
        attention: the backend that runs.
        engine: whether the modules of transformer-engine are asked for, which then is imported.
        interpret: whether kernels may run interpreted where there is no GPU.
    """
    why_not = why_not_on(device.type)
    if why_not is None and device.type == "cpu":
        on_cpu = "the run is on a CPU, and Triton's kernels need an NVIDIA GPU"
        why_not = why_not_interpreted() if interpret else on_cpu
    shape = plan.shape
    limits: dict[Operator, str] = {}
    if shape.hidden > rms_norm.MAX_COLS:
        limits["norm"] = f"a hidden size of {shape.hidden} is above the kernel's {rms_norm.MAX_COLS}"
    if shape.qk_norm != "none" and shape.head_dim > qk_norm.MAX_HEAD_DIM:
        limits["qk_norm"] = (
            f"a head of {shape.head_dim} channels is above the kernel's {qk_norm.MAX_HEAD_DIM}"
        )
    if plan.seq_length > masked_softmax.MAX_COLS:
        limits["masked_softmax"] = f"{plan.seq_length} keys are above the kernel's {masked_softmax.MAX_COLS}"
    if shape.softcap:
        limits["masked_softmax"] = "the kernel knows no soft-capping of scores"
    if shape.softmax_type != "vanilla":
        limits["masked_softmax"] = "the kernel knows no attention sinks"
    return Conditions(
        device=device.type,
        precision=plan.precision,
        attention=attention,
        why_not=why_not,
        why_no_engine=why_no_engine(device.type, shape) if engine else None,
        limits=limits,
    )
