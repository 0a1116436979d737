"""The fp8 GEMMs of a model: which objects replace its sites, and what happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from torch import Tensor

from redline.formulas.operators import Operator
from redline.model.block import MLP, Block, SelfAttention
from redline.model.fp8 import Fp8Gemm, Fp8Site
from redline.model.fp8_fused import KINDS, Fp8Mlp, Fp8NormSite
from redline.model.fp8_head import Fp8Head
from redline.model.modules import Linear, Norm
from redline.model.transformer import Transformer
from redline.precision.fp8 import Fp8State


class Fp8Gemms:
    """Puts sites of a model into fp8: weights are cast once a step, scales renewed after it.

    Args:
        model: whose sites are replaced, in place.
        state: the scaling state; it names the sites.
        fused: the operators that run as kernels: a fused norm or activation writes fp8 itself.
        fuse_wgrad: of weight gradients that are not computed in fp8.
        head: whether the products of the output head with logits in chunks run in fp8 too.
    """

    def __init__(
        self,
        model: Transformer,
        state: Fp8State,
        *,
        fused: Collection[Operator] = (),
        fuse_wgrad: bool = True,
        head: bool = False,
    ) -> None:
        self.state = state
        self._fuse_wgrad = fuse_wgrad
        self._fused = frozenset(fused) if state.spec.wgrad else frozenset()
        self.gemms: dict[str, Fp8Gemm] = {}
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Block)
            self._place_attention(f"layers.{index}.attention", layer.attention)
            self._place_mlp(f"layers.{index}.mlp", layer.mlp)
        self.head = Fp8Head(model) if head else None
        if self.head is not None:
            model.ops = replace(model.ops, head_loss=partial(model.ops.head_loss, products=self.head))
        self._stale = True

    def begin_step(self) -> None:
        """Before the first forward of a step, once the gradients are zero."""
        self.prepare()
        for gemm in self.gemms.values():
            gemm.fresh = True

    def prepare(self) -> None:
        """Cast the weights, if they have changed since: before the first forward of an evaluation."""
        if not self._stale:
            return
        for gemm in self.gemms.values():
            gemm.refresh()
        if self.head is not None:
            self.head.refresh()
        self._stale = False

    def step(self) -> None:
        """After the optimizer's update: renew the scales; the cast weights are out of date."""
        self.state.step()
        self._stale = True

    def forget(self) -> None:
        """After an evaluation, whose values say nothing about training's."""
        self.state.amax.zero_()
        self._stale = True

    def _place_attention(self, name: str, attention: SelfAttention) -> None:
        qkv, proj = self._gemm(f"{name}.qkv", attention.qkv), self._gemm(f"{name}.proj", attention.proj)
        if qkv is not None:
            attention.qkv_site = self._after_norm(attention.norm, qkv, attention.rebuilds_norm)
        if proj is not None:
            attention.proj_site = Fp8Site(None, proj, fuse_wgrad=self._fuse_wgrad)

    def _place_mlp(self, name: str, mlp: MLP) -> None:
        fc1, fc2 = self._gemm(f"{name}.fc1", mlp.fc1), self._gemm(f"{name}.fc2", mlp.fc2)
        kind, rebuilds = mlp.shape.activation, mlp.rebuilds
        if fc1 is not None and fc2 is not None and {"norm", "activation"} <= self._fused and kind in KINDS:
            mlp.whole = Fp8Mlp(mlp.norm, fc1, fc2, kind, rebuilds)
            return
        if fc1 is not None:
            mlp.fc1_site = self._after_norm(mlp.norm, fc1, rebuilds["layernorm"])
        if fc2 is not None:
            again = rebuilds["activation"]
            mlp.fc2_site = Fp8Site(mlp.activation, fc2, fuse_wgrad=self._fuse_wgrad, rebuild=again)

    def _after_norm(self, norm: Norm, gemm: Fp8Gemm, rebuild: bool) -> Callable[[Tensor], Tensor]:
        if "norm" in self._fused:
            return Fp8NormSite(norm, gemm, rebuild=rebuild)
        return Fp8Site(norm, gemm, fuse_wgrad=self._fuse_wgrad, rebuild=rebuild)

    def _gemm(self, name: str, linear: Linear) -> Fp8Gemm | None:
        """The fp8 side of a site, where it is one of the state's."""
        if name not in self.state.sites:
            return None
        self.gemms[name] = Fp8Gemm(name, linear, self.state)
        return self.gemms[name]
