"""The output head in fp8: logits and the gradient of the hidden states; that of the weight stays in 16 bits.

Scales are measured, by one more read of each operand. The gradient of the logits is always in E5M2: beside
the one large value of a token's label stand a hundred thousand that are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels import fp8
from redline.model.transformer import Transformer
from redline.precision.fp8 import measured_cast

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
        q_VH, q_HV, inverse = measured_cast(self._model.head_weight, VALUE, True, columns=True)
        self.q_VH.copy_(q_VH)
        self.q_HV.copy_(q_HV[:, : len(q_VH)])
        self.inverse.copy_(inverse)

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """logits = hidden W^T over the columns that logits has."""
        q_CH, _, inverse = measured_cast(hidden_CH, VALUE, True)
        used_VH = self.q_VH[: logits_CV.shape[1]]
        fp8.gemm_into(q_CH, used_VH, inverse, self.inverse, logits_CV, True)

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """dhidden = dlogits W."""
        q_CV, _, inverse = measured_cast(dlogits_CV, GRADIENT, True)
        used_HV = self.q_HV[:, : dlogits_CV.shape[1]]
        fp8.gemm_into(q_CV, used_HV, inverse, self.inverse, dhidden_CH, False)
