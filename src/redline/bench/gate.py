"""Is a fused operator right? Its error against float64 may be a tenth above that of its plain twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.kernels.bench_case import BenchCase, Provider

SEED = 1234
MARGIN = 1.1
HOPELESS = 1e30  # finite, for JSON
HALF_FLOOR, WIDE_FLOOR = 0.3, 8.0  # of a unit of the dtype: one rounding to 16 bits; the order of a wide sum


@dataclass(frozen=True, slots=True)
class Gate:
    """What the check found.

    Attributes:
        passed: whether every result and gradient is accurate enough.
        worst: the largest error, over what it may be.
        where: the result with that error.
        against: "float64", or "eager" where the case has no float64 form (the bits of an optimizer state).
    """

    passed: bool
    worst: float
    where: str
    against: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def check(case: BenchCase, device: torch.device) -> Gate:
    """Run the fused operator and its twin, forward and backward, on equal inputs."""
    fused, eager = (case.providers[name]() for name in ("fused", "eager"))
    structured = any(not isinstance(each, Tensor) for each in draw(case, device))
    twin = _results(eager, draw(case, device))
    exact = twin
    if not structured:
        exact = _results(eager, tuple(map(_double, draw(case, device))), only_changed=True)
    got = _results(fused, draw(case, device))
    worst, where = 0.0, ""
    for name, want in exact.items():
        ratio = _ratio(
            got[name], twin[name], want, case.gradient_roundings if name.startswith("gradient") else 1
        )
        if ratio > worst:
            worst, where = ratio, name
    return Gate(worst <= 1.0, worst, where, "eager" if structured else "float64")


def draw(case: BenchCase, device: torch.device) -> tuple[Any, ...]:
    """Inputs of the case: the same ones at every call, in tensors of their own."""
    torch.manual_seed(SEED)
    return case.make_inputs(device, case.dtype)


def differentiable(inputs: Sequence[Any]) -> list[Tensor]:
    """The inputs that get a gradient."""
    return [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]


def outputs_of(result: Any) -> list[Tensor]:
    """What a provider returned, as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients to send back: 1 into a loss, random ones elsewhere, the same in every dtype."""
    found = []
    for out in outputs:
        generator = torch.Generator(out.device).manual_seed(SEED)
        if out.dim() == 0:
            found.append(torch.ones_like(out))
            continue
        random = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
        found.append(random.to(torch.bfloat16).to(out.dtype))
    return found


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _results(provider: Provider, inputs: tuple[Any, ...], *, only_changed: bool = False) -> dict[str, Tensor]:
    """Outputs, gradients, and the tensors without a gradient (a main_grad is added to), by name.

    Args:
        only_changed: leave out what PyTorch did not write. A kernel writes behind PyTorch's back, so its twin
            is asked which buffers count.
    """
    buffers = {
        f"buffer {index}": (each, each._version)
        for index, each in enumerate(inputs)
        if isinstance(each, Tensor) and each.is_floating_point() and not each.requires_grad
    }
    outputs = outputs_of(provider(*inputs))
    found = {f"output {index}": out.detach().clone() for index, out in enumerate(outputs)}
    wanted = differentiable(inputs)
    paths = [out for out in outputs if out.requires_grad]
    if paths and wanted:
        grads = torch.autograd.grad(paths, wanted, upstream_of(paths), allow_unused=True)
        found |= {f"gradient {index}": grad for index, grad in enumerate(grads) if grad is not None}
    changed = (
        name for name, (each, version) in buffers.items() if each._version != version or not only_changed
    )
    return found | {name: buffers[name][0] for name in changed}


def _ratio(got: Tensor, twin: Tensor, exact: Tensor, roundings: int) -> float:
    """The error of `got` over what it may be; HOPELESS where it is not finite.

    Independent roundings add up as their root: of `roundings` on the way to a 16-bit result.
    """
    if exact.numel() == 0:
        return 0.0
    size = _norm(exact)
    floor = HALF_FLOOR * roundings**0.5 if got.itemsize == 2 else WIDE_FLOOR
    limit = max(MARGIN * _distance(twin, exact), floor * torch.finfo(got.dtype).eps * size) + 1e-30
    ratio = _distance(got, exact) / limit
    return ratio if ratio < HOPELESS else HOPELESS


def _distance(a: Tensor, b: Tensor) -> float:
    """The 2-norm of a - b in float64, a few rows at a time: the tensors may be gigabytes."""
    pieces = zip(a.flatten().split(1 << 26), b.flatten().split(1 << 26), strict=True)
    squares = [(x.double() - y.double()).square().sum() for x, y in pieces]
    return float(torch.stack(squares).sum().sqrt())


def _norm(a: Tensor) -> float:
    squares = [piece.double().square().sum() for piece in a.flatten().split(1 << 26)]
    return float(torch.stack(squares).sum().sqrt())
