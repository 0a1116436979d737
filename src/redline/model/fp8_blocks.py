"""The fp8 side of a weight whose operands have a scale for each block: Fp8Gemm for `blockwise` and `mxfp8`.

    blockwise   1 x 128 along the summed dimension for x and dy, 128 x 128 for the weight
    mxfp8       1 x 32 along the summed dimension throughout

The two layouts of x and dy are two quantizations, both from the tensor itself. Forward reads x by rows and
the weight gradient by columns: the latter is what a site keeps for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels import fp8
from redline.model.fp8 import Operand
from redline.model.modules import Linear
from redline.precision.fp8 import Fp8State
from redline.precision.fp8 import Operand as OperandName

BLOCK = {"blockwise": 128, "mxfp8": 32}


class BlockGemm:
    """See Fp8Gemm, whose place it takes; nothing here depends on what earlier steps saw."""

    def __init__(self, site: str, linear: Linear, state: Fp8State) -> None:
        self.linear, self.state, self.site = linear, state, site
        self.x = state.scaling(site, "x")
        self.block = BLOCK[state.spec.recipe]
        self.square = state.spec.recipe == "blockwise"
        self.fresh = False
        with torch.no_grad():
            self.weights = tuple(torch.zeros_like(each) for each in self._cast_weight(kernel=False))

    @property
    def casts(self) -> tuple[Tensor, ...]:
        """The copies that are held beside the weight, with their scales."""
        return self.weights

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weight anew, after an update of the parameters."""
        for kept, found in zip(self.weights, self._cast_weight(self.state.kernels), strict=True):
            kept.copy_(found)
        self.state.note_blocks(self.site, "w", self.linear.weight, self.weights[0])

    def cast_input(self, x_TI: Tensor, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(what forward reads and its scales, what is kept for the weight gradient and its scales).

        columns: make the latter.
        """
        return self._cast(x_TI, "x", columns)

    def fprop(self, q_TI: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
        """x W^T, with the bias unless a later operation adds it: [T', I] -> [T', O]."""
        y_TO = self._gemm(q_TI, self.weights[0], inverse, self.weights[1], self.square, dtype)
        if self.linear.bias is not None and not self.linear.defer_bias:
            y_TO += self.linear.bias
        return y_TO

    def cast_gradient(self, dy_TO: Tensor, *, columns: bool = True) -> Operand:
        """The gradient of the output as the operand of dgrad and, with `columns`, of wgrad."""
        q_TO, inverse, q_OT, inverse_t = self._cast(dy_TO, "dy", columns)
        return Operand(q_TO, q_OT, inverse, inverse_t)

    def dgrad(self, dy: Operand, dtype: torch.dtype) -> Tensor:
        """dy W: [T', O] -> [T', I]."""
        return self._gemm(dy.q_TC, self.weights[2], dy.inverse, self.weights[3], self.square, dtype)

    def wgrad(self, main_grad_OI: Tensor, dy: Operand, q_IT: Tensor, inverse: Tensor) -> None:
        """main_grad += dy^T x."""
        assert dy.inverse_t is not None
        found = self._gemm(dy.q_CT, q_IT, dy.inverse_t, inverse, False, main_grad_OI.dtype)
        main_grad_OI += found

    def wgrad_again(self, main_grad_OI: Tensor, dy: Operand, x_TI: Tensor) -> None:
        """The same bits, of x as it was before its cast."""
        self.wgrad(main_grad_OI, dy, *self._cast(x_TI, "x", True)[2:])

    def _cast(
        self, x_TC: Tensor, operand: OperandName, columns: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = self.state.spec.dtype(operand)
        found = fp8.block_cast(x_TC, dtype, self.block, columns, self.state.kernels)
        self.state.note_blocks(self.site, operand, x_TC, found[0])
        return found

    def _cast_weight(self, kernel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight_OI, dtype = self.linear.weight, self.state.spec.dtype("w")
        if self.square:
            return fp8.square_cast(weight_OI, dtype, kernel)
        q, inverse, qt, inverse_t = fp8.block_cast(weight_OI, dtype, self.block, True, kernel)
        rows = len(weight_OI)  # whatever padding came with it belongs to tokens, not to weights
        return q[:rows], inverse[:, :rows].contiguous(), qt[:, :rows].contiguous(), inverse_t[: rows // 32]

    def _gemm(
        self, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, square: bool, dtype: torch.dtype
    ) -> Tensor:
        emulate = self.state.spec.emulate
        return fp8.block_gemm(a, b, a_inverse, b_inverse, self.block, square, dtype, emulate)
