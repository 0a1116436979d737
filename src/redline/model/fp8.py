"""A GEMM site in fp8: both operands of all three GEMMs in 8 bits, results in the compute dtype, sums in fp32.

    fprop   y  = x w^T       x, w in E4M3
    dgrad   dx = dy w        dy in E5M2 (hybrid)
    wgrad   dw += dy^T x     both transposed copies, straight into main_grad

What a site keeps for backward is the fp8 copy of x, one byte a value; nothing where attention keeps x itself,
of which the copy is then made again. fp8_weight.py says when the weight is cast; fp8_fused.py joins norm and
activation with their casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.comm import Group
from redline.formulas.fp8_sizes import Copies
from redline.kernels import fp8
from redline.model.fp8_opaque import OpaqueSite
from redline.model.fp8_weight import Fp8Weight
from redline.model.gemm import add_wgrad
from redline.model.main_grad import main_grad_of
from redline.model.modules import Linear
from redline.model.recompute import rebuilt
from redline.precision.fp8 import Fp8State, Scaling

Prologue = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in fp8, x ~ q * inverse; a layout that nobody asked for is empty.

    With scales of blocks the transposed copy has its own.
    """

    q_TC: Tensor
    q_CT: Tensor
    inverse: Tensor
    inverse_t: Tensor | None = None


class SiteGemm(Protocol):
    """What a site in fp8 asks of its GEMM: one scale a tensor (Fp8Gemm), or one a block (BlockGemm).

    Rows of results may be more than there are tokens: those of padding come last.
    """

    linear: Linear
    state: Fp8State
    x: Scaling
    fresh: bool

    @property
    def casts(self) -> Sequence[Tensor]: ...

    def refresh(self) -> None: ...

    def cast_input(self, x_TI: Tensor, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def fprop(self, q_TI: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor: ...

    def cast_gradient(self, dy_TO: Tensor, *, columns: bool = True) -> Operand: ...

    def dgrad(self, dy: Operand, dtype: torch.dtype) -> Tensor: ...

    def wgrad(self, main_grad_OI: Tensor, dy: Operand, kept: Tensor, inverse: Tensor) -> None: ...

    def wgrad_again(self, main_grad_OI: Tensor, dy: Operand, x_TI: Tensor) -> None: ...


class Fp8Gemm:
    """The fp8 side of one weight: its scalings, and its casts.

    Args:
        copies: of the weight's casts, kept through a step; see Fp8Weight.
        shares: operands, "x" or "dy", of which the ranks of a group hold some rows each, and the group: all
            of them cast alike.

    Attributes:
        fresh: main_grad is still zero, so the first weight gradient of the step is written and not added.
    """

    def __init__(
        self,
        site: str,
        linear: Linear,
        state: Fp8State,
        *,
        copies: Copies = 1,
        shares: Mapping[str, Group] = MappingProxyType({}),
    ) -> None:
        self.linear, self.state, self._shares = linear, state, shares
        self.x, self.w, self.dy = (state.scaling(site, operand) for operand in ("x", "w", "dy"))
        self.weight = Fp8Weight(linear, self.w, state, copies)
        self.fresh = False

    def refresh(self) -> None:
        """The parameters were updated."""
        self.weight.refresh()

    @property
    def casts(self) -> list[Tensor]:
        """The copies that are held beside the weight."""
        return self.weight.casts

    def cast_input(self, x_TI: Tensor, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(what forward reads and its scale, what is kept for the weight gradient and its scale).

        columns: make a layout that the weight gradient alone reads. Here there is none: it reads the same.
        """
        q_TI, _, inverse = self.state.cast(x_TI, self.x, among=self._shares.get("x"))
        return q_TI, inverse, q_TI, inverse

    def fprop(self, q_TI: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
        """x W^T in `dtype`, with the bias unless a later operation adds it: [T, I] -> [T, O]."""
        y_TO: Tensor = fp8.gemm(q_TI, self.weight.rows(), inverse, self.weight.inverse, dtype, True)
        if self.linear.bias is not None and not self.linear.defer_bias:
            y_TO += self.linear.bias
        return y_TO

    def cast_gradient(self, dy_TO: Tensor, *, columns: bool = True) -> Operand:
        """The gradient of the output as the operand of dgrad and, with `columns`, of wgrad."""
        return Operand(*self.state.cast(dy_TO, self.dy, columns=columns, among=self._shares.get("dy")))

    def dgrad(self, dy: Operand, dtype: torch.dtype) -> Tensor:
        """dy W: [T, O] -> [T, I]."""
        q_IO = self.weight.transposed()
        dx_TI: Tensor = fp8.gemm(dy.q_TC, q_IO, dy.inverse, self.weight.inverse, dtype, False)
        return dx_TI

    def wgrad(self, main_grad_OI: Tensor, dy: Operand, q_TI: Tensor, inverse: Tensor) -> None:
        """main_grad += dy^T x."""
        self._add_wgrad(main_grad_OI, dy, fp8.transpose(q_TI, self.state.kernels), inverse)

    def wgrad_again(self, main_grad_OI: Tensor, dy: Operand, x_TI: Tensor) -> None:
        """The same bits, of x as it was before its cast, which is made again in the layout that is needed."""
        among = self._shares.get("x")
        _, q_IT, inverse = self.state.cast(x_TI, self.x, rows=False, columns=True, among=among)
        self._add_wgrad(main_grad_OI, dy, q_IT, inverse)

    def _add_wgrad(self, main_grad_OI: Tensor, dy: Operand, q_IT: Tensor, inverse: Tensor) -> None:
        fp8.add_wgrad(main_grad_OI, dy.q_CT, q_IT, dy.inverse, inverse, self.fresh)
        self.fresh = False


def as_output(y_TO: Tensor, x: Tensor) -> Tensor:
    """[T, O] -> [..., O], a tensor of its own for autograd: the rotary kernel works in it, in place."""
    y: Tensor = torch.ops.aten._unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[1]))
    return y


class Fp8GemmFn(torch.autograd.Function):
    """y = x W^T + b in fp8. Saves x in fp8, or as it is: where the weight gradient is not computed in fp8,
    and with `again`, where somebody else keeps it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        q_TI, inverse = Fp8GemmFn.cast(ctx, x, *rest)
        y_TO = ctx.gemm.fprop(q_TI, inverse, x.dtype)[: x.shape[:-1].numel()]
        return as_output(y_TO, x)

    @staticmethod
    def cast(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        gemm: SiteGemm,
        fuse_wgrad: bool,
        again: bool,
    ) -> tuple[Tensor, Tensor]:
        """The operand of the product and its scale; the context gets all that backward asks of it."""
        as_it_is = again or not gemm.state.spec.wgrad
        q_TI, inverse, kept, kept_inverse = gemm.cast_input(x.flatten(0, -2), columns=not as_it_is)
        ctx.save_for_backward(x if as_it_is else kept, kept_inverse)
        ctx.gemm, ctx.fuse_wgrad, ctx.again = gemm, fuse_wgrad, again
        ctx.main_grads = main_grad_of(weight_OI), main_grad_of(bias_O)
        return q_TI, inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, inverse = ctx.saved_tensors
        gemm: SiteGemm = ctx.gemm
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        in_fp8 = gemm.state.spec.wgrad
        dy_TO = dy.flatten(0, -2)
        operand = gemm.cast_gradient(dy_TO, columns=needs_weight and in_fp8)
        dx = gemm.dgrad(operand, dy.dtype)[: len(dy_TO)].view(*dy.shape[:-1], -1) if needs_x else None
        weight_grad = None
        if needs_weight:
            total, weight_grad = weight_total(ctx, gemm)
            if not in_fp8:
                add_wgrad(total, dy_TO, kept.flatten(0, -2), ctx.fuse_wgrad)
            elif ctx.again:
                gemm.wgrad_again(total, operand, kept.flatten(0, -2))
            else:
                gemm.wgrad(total, operand, kept, inverse)
        return dx, weight_grad, bias_grad(ctx, dy_TO), None, None, None


def weight_total(ctx: Any, gemm: SiteGemm) -> tuple[Tensor, Tensor | None]:
    """Where a weight gradient is added: main_grad, or a tensor that backward returns, then given twice.

    `ctx` is that of a Function whose first inputs are x, weight, bias, with the `main_grads` of both.
    """
    main_grad: Tensor | None = ctx.main_grads[0]
    if main_grad is not None:
        return main_grad, None
    total = torch.zeros_like(gemm.linear.weight)
    return total, total


def bias_grad(ctx: Any, dy_TO: Tensor) -> Tensor | None:
    """The gradient of the bias, or None where there is none or it was added to main_grad; `ctx` as above."""
    if not ctx.needs_input_grad[2]:
        return None
    main_grad: Tensor | None = ctx.main_grads[1]
    if main_grad is None:
        return dy_TO.sum(0)
    main_grad += dy_TO.sum(0, dtype=main_grad.dtype)
    return None


class Fp8Site:
    """A Site whose GEMM runs in fp8, after its prologue in the compute dtype; `rebuild` as there.

    token: the site is part of a compiled block, and its GEMM one node there (fp8_opaque.py).
    dropped: and of a part of the block that keeps its input alone.
    again: the input is kept as it is by what made it; the weight gradient's operand is cast from it.
    """

    def __init__(
        self,
        prologue: Prologue | None,
        gemm: SiteGemm,
        *,
        fuse_wgrad: bool,
        rebuild: bool = False,
        token: Tensor | None = None,
        dropped: bool = False,
        again: bool = False,
    ) -> None:
        self.prologue, self.gemm, self.rebuild, self.again = prologue, gemm, rebuild, again
        self._rest = gemm.linear.weight, self._bias(), gemm, fuse_wgrad, again
        self.opaque: OpaqueSite | None = None
        if token is not None:
            remade = dropped or (rebuild and prologue is not None)
            width = len(gemm.linear.weight)
            keeps_x = again or not gemm.state.spec.wgrad
            self.opaque = OpaqueSite(Fp8GemmFn, self._rest, width, token, again=remade, keeps_x=keeps_x)

    def __call__(self, x: Tensor) -> Tensor:
        if self.prologue is None:
            return self.multiply(x)
        if not (torch.is_grad_enabled() and self.rebuild):
            return self.multiply(self.prologue(x))
        if self.opaque is not None or not self.gemm.state.spec.wgrad:
            return rebuilt(self.prologue, x, self.multiply)
        with self._casting_again(self.prologue, x.detach()):
            return self.multiply(self.prologue(x))

    def multiply(self, x: Tensor) -> Tensor:
        """The GEMM without what comes before it."""
        if self.opaque is not None:
            return self.opaque(x)
        y: Tensor = Fp8GemmFn.apply(x, *self._rest)
        return y

    def _bias(self) -> Tensor | None:
        return None if self.gemm.linear.defer_bias else self.gemm.linear.bias

    def _casting_again(self, prologue: Prologue, x: Tensor) -> AbstractContextManager[None]:
        """Drop the fp8 operand that the GEMM saves; its backward makes it from `x` again, to the bit."""

        def drop(saved: Tensor) -> Tensor | None:
            return None if saved.dtype == self.gemm.x.dtype else saved

        def again(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.no_grad():
                return self.gemm.cast_input(prologue(x).flatten(0, -2))[2]

        return torch.autograd.graph.saved_tensors_hooks(drop, again)
