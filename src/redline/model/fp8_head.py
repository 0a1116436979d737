"""The output head in fp8: logits and the gradient of the hidden states; that of the weight stays in 16 bits.

Scales are measured, by one more read of each operand, and belong to a state of their own: nothing of it is
worth keeping in a checkpoint. The gradient of the logits is always in E5M2: beside the one large value of a
token's label stand a hundred thousand that are small. A tensor-parallel rank casts its rows of the
vocabulary, and the gradient of their logits, by scales of its own: they meet nobody else's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redline.comm import Group
from redline.kernels import fp8
from redline.model.gemm import parameter_grads
from redline.model.main_grad import main_grad_of
from redline.model.ops import Ops
from redline.model.transformer import Transformer
from redline.precision.fp8 import OPERANDS, Fp8Spec, Fp8State

HEAD = "head"  # its name among sites


class Fp8Head:
    """The products of some tokens with the head's weight, cast once a step in both layouts.

    Args:
        ranks: those that share what tables say of its operands.
        kernels: casts run as Triton kernels.
        fuse_wgrad: of the weight's gradient, see gemm.add_wgrad.

    Attributes:
        state: measures its operands, and counts what their casts lose.
    """

    def __init__(
        self, model: Transformer, ranks: Group | None = None, *, kernels: bool, fuse_wgrad: bool = True
    ) -> None:
        self._model, self._fuse_wgrad = model, fuse_wgrad
        weight_VH = model.head_weight
        spec = Fp8Spec(recipe="tensorwise", history_len=1)
        self.state = Fp8State([HEAD], spec, weight_VH.device, ranks, kernels=kernels)
        self._x, self._w, self._dy = (self.state.scaling(HEAD, operand) for operand in OPERANDS)
        self.q_VH = torch.zeros_like(weight_VH, dtype=self._w.dtype)
        self.q_HV = torch.zeros_like(weight_VH.T.contiguous(), dtype=self._w.dtype)
        self.inverse = torch.ones(1, device=weight_VH.device)

    def in_place_of(self, ops: Ops, *, in_chunks: bool) -> Ops:
        """`ops` whose loss has its products here: of a chunk of tokens, or of all where logits are kept."""
        how: dict[str, Any] = {"products": self} if in_chunks else {"linear": self.linear}
        return replace(ops, head_loss=partial(ops.head_loss, **how))

    def begin_step(self, *, looks: bool) -> None:
        """Before the first forward of a step; `looks` as in Fp8Gemms.begin_step."""
        self.state.looks = looks
        self.state.amax.zero_()
        # Where nothing finite is measured, a scale is 1: not that of an earlier step, which a resume forgets.
        self.state.scale.fill_(1.0)

    def step(self) -> None:
        """After the optimizer's update: make the table, if there is to be one."""
        if self.state.looks:
            self.state.step()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weight anew, after an update of the parameters."""
        q_VH, q_HV, inverse = self.state.cast(self._model.head_weight, self._w, columns=True)
        self.q_VH.copy_(q_VH)
        self.q_HV.copy_(q_HV[:, : len(q_VH)])
        self.inverse.copy_(inverse)

    def linear(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        """gemm.linear with the head's weight: [T, H] -> [T, V]."""
        main_grad = main_grad_of(weight_VH)
        logits_TV: Tensor = Fp8HeadFn.apply(hidden_TH, weight_VH, None, main_grad, self._fuse_wgrad, self)
        return logits_TV

    def logits(self, hidden_CH: Tensor, logits_CV: Tensor) -> None:
        """logits = hidden W^T over the columns that logits has."""
        q_CH, _, inverse = self.state.cast(hidden_CH, self._x)
        used_VH = self.q_VH[: logits_CV.shape[1]]
        fp8.gemm_into(q_CH, used_VH, inverse, self.inverse, logits_CV, True)

    def dhidden(self, dlogits_CV: Tensor, dhidden_CH: Tensor) -> None:
        """dhidden = dlogits W."""
        q_CV, _, inverse = self.state.cast(dlogits_CV, self._dy)
        used_HV = self.q_HV[:, : dlogits_CV.shape[1]]
        fp8.gemm_into(q_CV, used_HV, inverse, self.inverse, dhidden_CH, False)


class Fp8HeadFn(torch.autograd.Function):
    """gemm.GemmFn whose products with the weight are the head's. Saves the hidden states as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias: None,
        main_grad: Tensor | None,
        fuse_wgrad: bool,
        head: Fp8Head,
    ) -> Tensor:
        ctx.save_for_backward(hidden_TH)
        ctx.weight_main_grad, ctx.bias_main_grad, ctx.fuse_wgrad, ctx.head = main_grad, None, fuse_wgrad, head
        logits_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH))
        head.logits(hidden_TH, logits_TV)
        return logits_TV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TV: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH,) = ctx.saved_tensors
        dhidden_TH = None
        if ctx.needs_input_grad[0]:
            dhidden_TH = torch.empty_like(hidden_TH)
            ctx.head.dhidden(dlogits_TV, dhidden_TH)
        dweight_VH, _ = parameter_grads(ctx, dlogits_TV, hidden_TH)
        return dhidden_TH, dweight_VH, None, None, None, None
