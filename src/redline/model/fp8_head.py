"""The output head in fp8: logits and the gradient of the hidden states; that of the weight stays in 16 bits.

Scales are measured, by one more read of each operand. The gradient of the logits is always in E5M2: beside
the one large value of a token's label stand a hundred thousand that are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels import fp8
from redline.kernels.fp8 import FP8_MAX
from redline.model.transformer import Transformer

VALUE, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


class Fp8Head:
    """The products of a chunk of tokens with the head's weight, cast once a step in both layouts."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        weight_VH = model.head_weight
        self.q_VH = torch.zeros_like(weight_VH, dtype=VALUE)
        self.q_HV = torch.zeros_like(weight_VH.T.contiguous(), dtype=VALUE)
        self.inverse = torch.ones(1, device=weight_VH.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weight anew, after an update of the parameters."""
        q_VH, q_HV, inverse = _measured(self._model.head_weight, VALUE, columns=True)
        self.q_VH.copy_(q_VH)
        self.q_HV.copy_(q_HV[:, : len(q_VH)])
        self.inverse.copy_(inverse)

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """logits = hidden W^T over the columns that logits has."""
        q_CH, _, inverse = _measured(hidden_CH, VALUE)
        used_VH = self.q_VH[: logits_CV.shape[1]]
        fp8.gemm_into(q_CH, used_VH, inverse, self.inverse, logits_CV, True)

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """dhidden = dlogits W."""
        q_CV, _, inverse = _measured(dlogits_CV, GRADIENT)
        used_HV = self.q_HV[:, : dlogits_CV.shape[1]]
        fp8.gemm_into(q_CV, used_HV, inverse, self.inverse, dhidden_CH, False)


def _measured(x_TC: Tensor, dtype: torch.dtype, columns: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(q, q^T, inverse scale), scaled by the largest value of x itself."""
    amax, one = torch.zeros(1, device=x_TC.device), torch.ones(1, device=x_TC.device)
    fp8.cast(x_TC, one, amax, dtype, False, False, True)
    scale = torch.where(amax > 0, FP8_MAX[dtype] / amax, one)
    q, qt = fp8.cast(x_TC, scale, amax, dtype, True, columns, True)
    return q, qt, scale.reciprocal()
