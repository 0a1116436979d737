"""The weight of a GEMM in fp8, in the two layouts that its products read.

    copies    rows [O, I], for forward              transposed [I, O], for the gradient of the input
    0         cast in each forward pass             cast in each backward pass
    1         cast once a step                      transposed in each backward pass
    2         cast once a step                      cast once a step

A weight that is stored in fp8 is its own rows; Fp8Params casts it. All give the same bits: scales change
between steps only, and a transpose moves bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.formulas.fp8_sizes import Copies
from redline.kernels import fp8
from redline.model.modules import Linear
from redline.precision.fp8 import Fp8State, Scaling


class Fp8Weight:
    """See above.

    Attributes:
        inverse: the inverse scale [1] of what `rows` and `transposed` gave last.
    """

    def __init__(self, linear: Linear, scaling: Scaling, state: Fp8State, copies: Copies = 1) -> None:
        self._linear, self._scaling, self._state = linear, scaling, state
        weight_OI = linear.weight.detach()
        self.stored = weight_OI.dtype == scaling.dtype
        self._q_OI: Tensor | None = None
        if self.stored:
            self._q_OI = weight_OI
        elif copies:
            self._q_OI = torch.zeros_like(weight_OI, dtype=scaling.dtype)
        self._q_IO = torch.zeros_like(weight_OI.T, dtype=scaling.dtype).contiguous() if copies == 2 else None
        self.inverse = torch.ones(1, device=state.scale.device)
        self._turned = False

    @property
    def casts(self) -> list[Tensor]:
        """The copies that are held beside the weight."""
        held = [self._q_IO] if self.stored else [self._q_OI, self._q_IO]
        return [each for each in held if each is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weight anew, after an update of the parameters, where casts are kept."""
        self._turned = self._q_IO is not None and not self.stored
        if self.stored:
            self.inverse.copy_(self._scaling.inverse)
        elif self._q_OI is not None:
            q_OI, q_IO = self._cast(rows=True, columns=self._turned)
            self._q_OI.copy_(q_OI)
            if self._q_IO is not None:
                self._q_IO.copy_(q_IO)

    def rows(self) -> Tensor:
        """[O, I]."""
        return self._cast(rows=True)[0] if self._q_OI is None else self._q_OI

    def transposed(self) -> Tensor:
        """[I, O]."""
        if self._turned:
            assert self._q_IO is not None
            return self._q_IO
        if self._q_OI is None:
            return self._cast(columns=True)[1]
        q_IO: Tensor = fp8.transpose(self._q_OI, self._state.kernels)
        if self._q_IO is None:
            return q_IO
        self._turned = True  # a stored weight arrives after `refresh`, so it is turned when first asked for
        return self._q_IO.copy_(q_IO)

    def _cast(self, *, rows: bool = False, columns: bool = False) -> tuple[Tensor, Tensor]:
        weight_OI = self._linear.weight.detach()
        q_OI, q_IO, inverse = self._state.cast(weight_OI, self._scaling, rows=rows, columns=columns)
        self.inverse.copy_(inverse)
        return q_OI, q_IO
