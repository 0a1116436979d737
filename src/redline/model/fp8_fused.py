"""Sites whose operand never exists in the compute dtype: norm and activation end in fp8, and begin there.

    norm + qkv    norm -> fp8 in one kernel, GEMM
    norm + MLP    norm -> fp8, fc1, activation -> fp8, fc2; the activation's backward ends in fp8 too, in both
                  layouts, for the two GEMMs of fc1's backward

Kept for backward: the inputs of the norm and of the activation, and the fp8 copies that GEMMs read. They run
where the fused norm and activation do; elsewhere fp8.py casts after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from redline.kernels import fp8
from redline.kernels.activation_reference import Form
from redline.kernels.layer_norm import layer_norm_backward
from redline.kernels.rms_norm import rms_norm_backward
from redline.model.fp8 import Fp8Gemm, Operand, as_output
from redline.model.fp8_opaque import OpaqueSite
from redline.model.local import KINDS
from redline.model.main_grad import main_grad_of
from redline.model.modules import Norm
from redline.precision.fp8 import Purpose

Three = tuple[Tensor, Tensor, Tensor]


class Fp8Norm:
    """A norm whose output is the operand of a GEMM; with `rebuild` it is dropped and cast again."""

    def __init__(self, norm: Norm, gemm: Fp8Gemm, *, rebuild: bool) -> None:
        self.norm, self.gemm, self.rebuild = norm, gemm, rebuild
        self.layer = norm.form["kind"] == "LayerNorm"

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q [T, H], its inverse scale, the rows' mean (empty for RMSNorm) and 1 / deviation)."""
        form, dtype = self.norm.form, self.gemm.x.dtype

        def run(scale: Tensor, amax: Tensor, purpose: Purpose) -> Three:
            options = (self.layer, form["epsilon"], form["zero_centered"])
            found: Three = fp8.norm_cast(x_TH, *self.norm.affine, *options, scale, amax, dtype, True)
            return found

        (q_TH, mean_T, rstd_T), inverse = self.gemm.state.casting(self.gemm.x, run)
        return q_TH, inverse, mean_T, rstd_T

    def keep(self, q_TH: Tensor) -> Tensor | None:
        """What of the operand is saved."""
        return None if self.rebuild else q_TH

    def restore(self, q_TH: Tensor | None, x_TH: Tensor) -> Tensor:
        """The operand, from what `keep` kept."""
        return self.forward(x_TH)[0] if q_TH is None else q_TH

    def backward(self, dn_TH: Tensor, x_TH: Tensor, mean_T: Tensor, rstd_T: Tensor) -> Tensor:
        """dx; the gradients of gain and bias go to their main_grad."""
        weight, bias = self.norm.affine
        grads, centred = (main_grad_of(weight), main_grad_of(bias)), self.norm.form["zero_centered"]
        if self.layer:
            found = layer_norm_backward(dn_TH, None, x_TH, weight, bias, mean_T, rstd_T, *grads, centred)
        else:
            found = rms_norm_backward(dn_TH, None, x_TH, weight, rstd_T, grads[0], centred)
        dx_TH: Tensor = found[0]
        return dx_TH


class Fp8NormGemmFn(torch.autograd.Function):
    """y = norm(x) W^T + b. Parameters are arguments so that autograd knows of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Fp8Norm, *_: Tensor) -> Tensor:
        y_TO = norm.gemm.fprop(*Fp8NormGemmFn.cast(ctx, x, norm), x.dtype)
        return as_output(y_TO, x)

    @staticmethod
    def cast(ctx: Any, x: Tensor, norm: Fp8Norm, *_: Tensor) -> tuple[Tensor, Tensor]:
        """As Fp8GemmFn.cast."""
        x_TH = x.flatten(0, -2)
        q_TH, *rest = norm.forward(x_TH)
        ctx.save_for_backward(x_TH, norm.keep(q_TH), *rest)
        ctx.norm = norm
        return q_TH, rest[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, q_TH, inverse, mean_T, rstd_T = ctx.saved_tensors
        norm: Fp8Norm = ctx.norm
        dy_TO = dy.flatten(0, -2)
        operand = norm.restore(q_TH, x_TH)
        dn_TH = _through(norm.gemm, norm.gemm.cast_gradient(dy_TO), operand, inverse, x_TH.dtype)
        bias_O = norm.gemm.linear.bias
        if bias_O is not None and (total := main_grad_of(bias_O)) is not None:
            total += dy_TO.sum(0, dtype=total.dtype)
        dx_TH = norm.backward(dn_TH, x_TH, mean_T, rstd_T)
        return dx_TH.view(*dy.shape[:-1], -1), None, *(None,) * (len(ctx.needs_input_grad) - 2)


class Fp8NormSite:
    """norm + qkv."""

    def __init__(self, norm: Norm, gemm: Fp8Gemm, *, rebuild: bool) -> None:
        self.norm = Fp8Norm(norm, gemm, rebuild=rebuild)
        self.parameters = tuple(_parameters(norm, gemm.linear))

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = Fp8NormGemmFn.apply(x, self.norm, *self.parameters)
        return y

    def opaque(self, token: Tensor, *, dropped: bool = False) -> OpaqueSite:
        """The same for a compiled block, or for a part of one that keeps its input alone."""
        width = len(self.norm.gemm.linear.weight)
        rest = self.norm, *self.parameters
        return OpaqueSite(Fp8NormGemmFn, rest, width, token, again=dropped, keeps_x=True)


class Fp8MlpFn(torch.autograd.Function):
    """y = act(norm(x) W_1^T + b_1) W_2^T. The bias of fc2 is added by whoever comes next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: Fp8Mlp, *_: Tensor) -> Tensor:
        y_TH = mlp.fc2.fprop(*Fp8MlpFn.cast(ctx, x, mlp), x.dtype)
        return as_output(y_TH, x)

    @staticmethod
    def cast(ctx: Any, x: Tensor, mlp: Fp8Mlp, *_: Tensor) -> tuple[Tensor, Tensor]:
        """As Fp8GemmFn.cast, for the last product."""
        x_TH = x.flatten(0, -2)
        q_TH, inverse_1, mean_T, rstd_T = mlp.norm.forward(x_TH)
        h_TX = mlp.fc1.fprop(q_TH, inverse_1, x.dtype)
        q_TF, inverse_2 = mlp.activate(h_TX)
        kept = mlp.norm.keep(q_TH), None if mlp.rebuild else q_TF
        ctx.save_for_backward(x_TH, kept[0], inverse_1, mean_T, rstd_T, h_TX, kept[1], inverse_2)
        ctx.mlp = mlp
        return q_TF, inverse_2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, q_TH, inverse_1, mean_T, rstd_T, h_TX, q_TF, inverse_2 = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # the largest of a layer go as soon as they have been read
        mlp: Fp8Mlp = ctx.mlp
        dy_TH = dy.flatten(0, -2)
        q_TF = mlp.activate(h_TX)[0] if q_TF is None else q_TF
        da_TF = _through(mlp.fc2, mlp.fc2.cast_gradient(dy_TH), q_TF, inverse_2, dy.dtype)
        del q_TF
        dh = mlp.activate_backward(da_TF, h_TX)
        del da_TF, h_TX
        dn_TH = _through(mlp.fc1, dh, mlp.norm.restore(q_TH, x_TH), inverse_1, dy.dtype)
        dx_TH = mlp.norm.backward(dn_TH, x_TH, mean_T, rstd_T)
        return dx_TH.view(dy.shape), None, *(None,) * (len(ctx.needs_input_grad) - 2)


class Fp8Mlp:
    """norm, fc1, activation and fc2 of an MLP as one Function.

    form: of the activation: kind, clamp, offset.
    rebuilds: which operands are dropped and cast again: "layernorm", "activation".
    """

    def __init__(
        self,
        norm: Norm,
        fc1: Fp8Gemm,
        fc2: Fp8Gemm,
        form: Mapping[str, Any],
        rebuilds: Mapping[str, bool],
    ) -> None:
        self.norm, self.fc1, self.fc2 = Fp8Norm(norm, fc1, rebuild=rebuilds["layernorm"]), fc1, fc2
        self.rebuild = rebuilds["activation"]
        self.form = Form(*KINDS[form["kind"]], form["clamp"], form["offset"])
        self.parameters = (*_parameters(norm, fc1.linear), fc2.linear.weight)

    def activate(self, h_TX: Tensor) -> tuple[Tensor, Tensor]:
        """(the operand of fc2 [T, F], its inverse scale)."""
        bias, scaling = self.fc1.linear.bias, self.fc2.x

        def run(scale: Tensor, amax: Tensor, purpose: Purpose) -> tuple[Tensor]:
            return (fp8.activation_cast(h_TX, bias, *self.form, scale, amax, scaling.dtype, True),)

        (q_TF,), inverse = self.fc1.state.casting(scaling, run)
        return q_TF, inverse

    def activate_backward(self, da_TF: Tensor, h_TX: Tensor) -> Operand:
        """The gradient of fc1's output; that of its bias goes to main_grad."""
        bias, scaling = self.fc1.linear.bias, self.fc1.dy

        def run(scale: Tensor, amax: Tensor, purpose: Purpose) -> Three:
            main_grad = main_grad_of(bias) if purpose is Purpose.CAST else None
            found: Three = fp8.activation_cast_backward(
                da_TF, h_TX, bias, main_grad, *self.form, scale, amax, scaling.dtype, True
            )
            return found

        (q_TX, q_XT, _), inverse = self.fc1.state.casting(scaling, run)
        return Operand(q_TX, q_XT, inverse)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = Fp8MlpFn.apply(x, self, *self.parameters)
        return y

    def opaque(self, token: Tensor, *, dropped: bool) -> OpaqueSite:
        """The same for a compiled block; `dropped`: it keeps its input alone."""
        width = len(self.fc2.linear.weight)
        rest = self, *self.parameters
        return OpaqueSite(Fp8MlpFn, rest, width, token, again=dropped, keeps_x=True)


def _through(gemm: Fp8Gemm, dy: Operand, q_TI: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Both GEMMs of a backward: the weight gradient into main_grad, the gradient of the input returned.

    In this order, since the first needs the most memory beside it.
    """
    weight_OI = gemm.linear.weight
    if weight_OI.requires_grad:
        total = main_grad_of(weight_OI)
        assert total is not None, "fused fp8 sites write into main_grad"
        gemm.wgrad(total, dy, q_TI, inverse)
    return gemm.dgrad(dy, dtype)


def _parameters(norm: Norm, linear: nn.Module) -> Iterator[Tensor]:
    for module in (norm, linear):
        yield from module.parameters()
