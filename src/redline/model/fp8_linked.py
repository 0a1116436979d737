"""fp8 GEMMs of sequence-parallel ranks whose rows travel as they are multiplied (`--tp-comm-overlap`): cast
first, then sent, a byte a value.

                 forward                              backward
    column       y = gather(q) W^T                    gather of q behind the dgrad GEMM, reduce-scatter of dx
                                                      behind the wgrad GEMM
    row          y = reduce-scatter(q W^T)            dx = gather(dq) W

The ranks hold rows of one operand and cast them by one scale: where operands are measured, by the largest
value of all of them. So the bytes that arrive are those of a gather in 16 bits and a cast of the whole behind
it, and results are the same bits where the GEMMs are the same. What is summed over ranks travels in 16 bits.
A column site keeps its own rows of q, and gathers them again for the weight gradient, as in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.comm.collectives import Pending, all_gather
from redline.comm.linked_gemm import Chunked, LinkedGemm, Plain, Product
from redline.kernels import fp8
from redline.model.fp8 import Fp8Gemm, Fp8Site, Operand, Prologue, bias_grad, weight_total
from redline.model.main_grad import main_grad_of
from redline.model.parallel_gemm import shaped
from redline.model.tensor_parallel import TensorParallel


def as_bytes(q: Tensor) -> Tensor:
    """What travels: collectives know no fp8."""
    return q.view(torch.uint8)


def random_product(K: int, N: int, dtype: torch.dtype, device: torch.device) -> Product:
    """A forward product in `dtype` by a random weight, to be timed: of bytes [R, K] -> [R, N]."""
    w_NK = torch.randn(N, K, dtype=dtype, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=device)

    def into(q_RK: Tensor, y_RN: Tensor) -> None:
        fp8.gemm_into(q_RK.view(w_NK.dtype), w_NK, one, one, y_RN, True)

    return Product(into, N, dtype)


def forward_product(gemm: Fp8Gemm, inverse: Tensor, dtype: torch.dtype) -> Product:
    """x W^T in `dtype`, of rows of x in fp8 or as bytes: [R, I] -> [R, O]."""
    q_OI = gemm.weight.rows()

    def into(q_RI: Tensor, y_RO: Tensor) -> None:
        fp8.gemm_into(q_RI.view(gemm.x.dtype), q_OI, inverse, gemm.weight.inverse, y_RO, True)

    return Product(into, len(q_OI), dtype)


def backward_product(gemm: Fp8Gemm, inverse: Tensor, dtype: torch.dtype) -> Product:
    """dy W in `dtype`, of rows of dy in fp8 or as bytes: [R, O] -> [R, I]."""
    q_IO = gemm.weight.transposed()

    def into(q_RO: Tensor, dx_RI: Tensor) -> None:
        fp8.gemm_into(q_RO.view(gemm.dy.dtype), q_IO, inverse, gemm.weight.inverse, dx_RI, False)

    return Product(into, len(q_IO), dtype)


class LinkedColumnFn(torch.autograd.Function):
    """This rank's output features of x W^T + b, from its own rows of x: [S/tp, B, I] -> [S, B, O/tp]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gemm: Fp8Gemm, tp: TensorParallel
    ) -> Tensor:
        q_RI, inverse, _, _ = gemm.cast_input(x.flatten(0, -2))
        by = forward_product(gemm, inverse, x.dtype)
        y_TO, _ = _able(tp.gather_gemm).gather_product(as_bytes(q_RI), by, tp.group)
        if bias_O is not None:
            y_TO += bias_O
        ctx.save_for_backward(q_RI, inverse)
        ctx.gemm, ctx.tp, ctx.main_grads = gemm, tp, (main_grad_of(weight_OI), main_grad_of(bias_O))
        return shaped(y_TO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q_RI, inverse = ctx.saved_tensors
        gemm: Fp8Gemm = ctx.gemm
        tp: TensorParallel = ctx.tp
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dy_TO = dy.flatten(0, -2)
        operand = gemm.cast_gradient(dy_TO, columns=needs_weight)
        gathering = tp.gather_gemm.gather(as_bytes(q_RI), tp.group) if needs_weight else Pending(q_RI)
        if not tp.bulk_wgrad:
            gathering.wait()
        sending = _send_input_grad(gemm, operand, dy.dtype, tp) if needs_x else None
        if sending is not None and not tp.bulk_dgrad:
            sending.wait()
        weight_grad = None
        if needs_weight:
            total, weight_grad = weight_total(ctx, gemm)
            gemm.wgrad(total, operand, gathering.wait().view(gemm.x.dtype), inverse)
        dx = None if sending is None else shaped(sending.wait(), dy)
        return dx, weight_grad, bias_grad(ctx, dy_TO), None, None


def _send_input_grad(gemm: Fp8Gemm, dy: Operand, dtype: torch.dtype, tp: TensorParallel) -> Pending:
    """The gradient of a column GEMM's input, on its way to the ranks that hold its rows."""
    if tp.scatter_dgrad:
        by = backward_product(gemm, dy.inverse, dtype)
        return Pending(_able(tp.gemm_scatter).product_scatter(dy.q_TC, by, tp.group))
    return tp.gemm_scatter.scatter(gemm.dgrad(dy, dtype), tp.group)


class LinkedRowFn(torch.autograd.Function):
    """This rank's rows of x W^T, summed over the ranks' input features: [S, B, I/tp] -> [S/tp, B, O]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: None, gemm: Fp8Gemm, tp: TensorParallel, again: bool
    ) -> Tensor:
        q_TI, inverse, _, _ = gemm.cast_input(x.flatten(0, -2))
        by = forward_product(gemm, inverse, x.dtype)
        y_RO = _able(tp.gemm_scatter).product_scatter(q_TI, by, tp.group)
        ctx.save_for_backward(x if again else q_TI, inverse)
        ctx.gemm, ctx.tp, ctx.again = gemm, tp, again
        ctx.main_grads = main_grad_of(weight_OI), None
        return shaped(y_RO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, inverse = ctx.saved_tensors
        gemm: Fp8Gemm = ctx.gemm
        tp: TensorParallel = ctx.tp
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        own = gemm.cast_gradient(dy.flatten(0, -2), columns=False)
        dx_TI = weight_grad = None
        if needs_x:
            by = backward_product(gemm, own.inverse, dy.dtype)
            dx_TI, bytes_TO = _able(tp.gather_gemm).gather_product(as_bytes(own.q_TC), by, tp.group)
        else:
            bytes_TO = all_gather(as_bytes(own.q_TC), tp.group)
        if needs_weight:
            q_TO = bytes_TO.view(gemm.dy.dtype)
            whole = Operand(q_TO, fp8.transpose(q_TO, gemm.state.kernels), own.inverse)
            total, weight_grad = weight_total(ctx, gemm)
            if ctx.again:
                gemm.wgrad_again(total, whole, kept.flatten(0, -2))
            else:
                gemm.wgrad(total, whole, kept, inverse)
        return None if dx_TI is None else shaped(dx_TI, dy), weight_grad, None, None, None, None


def _able(linked: LinkedGemm) -> Plain | Chunked:
    assert isinstance(linked, Plain | Chunked), "in fp8 the start refuses methods that multiply 16 bits alone"
    return linked


class LinkedSite(Fp8Site):
    """An Fp8Site joined to its collective; what `rebuild` casts again are the rows that it kept.

    column: the ranks hold some output features each, else some input features.
    """

    def __init__(
        self,
        prologue: Prologue | None,
        gemm: Fp8Gemm,
        tp: TensorParallel,
        *,
        column: bool,
        rebuild: bool = False,
        again: bool = False,
    ) -> None:
        super().__init__(prologue, gemm, fuse_wgrad=True, rebuild=rebuild, again=again)
        self._tp, self._column = tp, column

    def multiply(self, x: Tensor) -> Tensor:
        """The GEMM and its collective, without what comes before them."""
        rest = self.gemm.linear.weight, self._bias(), self.gemm, self._tp
        y: Tensor = (
            LinkedColumnFn.apply(x, *rest) if self._column else LinkedRowFn.apply(x, *rest, self.again)
        )
        return y
