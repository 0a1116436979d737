"""Which dtype each class of tensor has in a run; nothing else in the program names one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redline.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The dtypes of one run.

    Attributes:
        compute: activations and GEMM operands.
        param: the parameters that GEMMs read.
        main: the parameters and moments that the optimizer steps.
        grad: `main_grad`, where weight gradients accumulate and are reduced.
        loss_scaling: whether the loss is scaled dynamically (fp16: small gradients would vanish).
    """

    compute: torch.dtype
    param: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    loss_scaling: bool = False


def make_recipe(name: str, grad_in_bf16: bool = False) -> Recipe:
    """The recipe of `--fp64`, `--fp32`, `--bf16` or `--fp16`.

    The half formats keep main parameters and gradients in fp32; fp32 and fp64 are one dtype throughout.

    Raises: ConfigError for an unknown name, or for bf16 gradients under anything but bf16.
    """
    if name not in DTYPES:
        raise ConfigError(f"precision {name!r} is unknown.", mend=f"use one of {', '.join(DTYPES)}.")
    if grad_in_bf16 and name != "bf16":
        raise ConfigError(
            f"bf16 main gradients cannot be used with --{name}.",
            why="--grad-reduce-in-bf16 and --main-grads-dtype keep them in the dtype of bf16 parameters.",
            mend="add --bf16, or drop the option.",
        )
    dtype = DTYPES[name]
    if name in ("fp64", "fp32"):
        return Recipe(compute=dtype, param=dtype, main=dtype, grad=dtype)
    grad = torch.bfloat16 if grad_in_bf16 else torch.float32
    return Recipe(compute=dtype, param=dtype, main=torch.float32, grad=grad, loss_scaling=name == "fp16")
