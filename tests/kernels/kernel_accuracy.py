"""How kernel tests judge a result: against float64, by the error of the unfused path in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients(
    fn: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of fn(*inputs), then the gradient of each floating input, for the given output gradients."""
    leaves = [
        x.detach().clone().requires_grad_(x.is_floating_point()) if x is not None else None for x in inputs
    ]
    out = fn(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    computed = torch.autograd.grad(
        outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    )
    return [o.detach() for o in outputs] + list(computed)


def assert_same(a: Tensor, b: Tensor) -> None:
    """Equal up to the order of sums, which on a GPU follows the memory layout (fp32, values near 1)."""
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=1e-6 if a.is_cuda else 0.0, atol=1e-6 if a.is_cuda else 0.0)


def assert_no_worse(fused: Tensor, unfused: Tensor, exact: Tensor, what: str = "", ulps: float = 8.0) -> None:
    """The fused error is at most 1.1 times the unfused error, in the 2-norm over the tensor.

    Two floors stand for cases where the unfused path happens to be nearly exact. One correct rounding to the
    dtype costs up to half a step, 0.3 in the mean square. In fp32, where inside and outside are the same
    dtype, the order of a sum or an exp one step off decides which good result is nearer: `ulps` steps.
    """
    assert fused.dtype == unfused.dtype, f"{what}: {fused.dtype} against {unfused.dtype}"
    assert fused.shape == exact.shape, f"{what}: {tuple(fused.shape)} against {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    assert torch.isfinite(fused).all(), f"{what}: not finite"
    size = exact.double().norm().item()
    floor = (ulps if fused.dtype == torch.float32 else 0.3) * torch.finfo(fused.dtype).eps * size
    error = (fused.double() - exact).norm().item()
    limit = max(1.1 * (unfused.double() - exact).norm().item(), floor)
    assert error <= limit + 1e-30, f"{what}: error {error:.3e} above {limit:.3e} (size {size:.3e})"


def assert_operator_no_worse(
    fused: Callable[..., Tensor | tuple[Tensor, ...]],
    unfused: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    names: Sequence[str],
    what: str = "",
    ulps: float = 8.0,
) -> None:
    """`assert_no_worse` of each output and gradient; the reference gets the same numbers in float64.

    Args:
        names: of the outputs, then of the inputs' gradients. An input that is None, the last one, has none.
    """
    found, plain = (gradients(each, inputs, grads) for each in (fused, unfused))
    wide = [None if x is None else x.double() for x in inputs]
    exact = gradients(reference, wide, [grad.double() for grad in grads])
    assert len(found) == len(names) - sum(x is None for x in inputs)
    for name, f, p, e in zip(names[: len(found)], found, plain, exact, strict=True):
        assert_no_worse(f, p, e, f"{name} {what}", ulps)
