"""The fp8 GEMMs of a model: which objects replace its sites, and what happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from redline.comm import Group
from redline.errors import CheckpointError
from redline.formulas.activations import COLUMNS
from redline.formulas.fp8_sizes import Copies
from redline.formulas.operators import Operator
from redline.model.block import MLP, Block, SelfAttention
from redline.model.fp8 import Fp8Gemm, Fp8Site, Prologue, SiteGemm
from redline.model.fp8_blocks import BlockGemm
from redline.model.fp8_fused import Fp8Mlp, Fp8NormSite
from redline.model.fp8_head import Fp8Head
from redline.model.fp8_linked import LinkedSite
from redline.model.fp8_params import Fp8Params
from redline.model.modules import Linear, Norm, Site
from redline.model.transformer import Transformer
from redline.precision.fp8 import NEVER, Fp8State, Operand
from redline.precision.fp8_stats import Fp8Row


class Fp8Gemms:
    """Puts sites of a model into fp8: weights are cast once a step, scales renewed after it.

    Args:
        model: whose sites are replaced, in place.
        state: the scaling state; it names the sites.
        fused: the operators that run as kernels: a fused norm or activation writes fp8 itself.
        fuse_wgrad: of weight gradients that are not computed in fp8.
        head: whether the products of the output head run in fp8 too.
        params: casts the weights, where they are stored in fp8.
        copies: of a weight's casts, kept through a step; see fp8_weight.py.
        compiled: the blocks are to be compiled.
        keeps_output: attention keeps its output for its own backward; proj casts its input anew from that.
        linked: sequence-parallel ranks cast their rows before they are sent, joined to the GEMMs.
        arrival: waits for the parameters of a part of the model that are still on their way when a step
            begins (Transformer.before_part); None: they are all there.
    """

    def __init__(
        self,
        model: Transformer,
        state: Fp8State,
        *,
        fused: Collection[Operator] = (),
        fuse_wgrad: bool = True,
        head: bool = False,
        params: Fp8Params | None = None,
        copies: Copies = 1,
        compiled: bool = False,
        keeps_output: bool = False,
        linked: bool = False,
        arrival: Callable[[str], None] | None = None,
    ) -> None:
        self.state = state
        self._token = torch.zeros(1, device=state.scale.device) if compiled else None
        self._params, self._copies, self._arrival = params, copies, arrival
        if arrival is not None:
            model.before_part = self._before
        self._fuse_wgrad = fuse_wgrad
        self._tp, self._linked, self._keeps_output = model.tp, linked, keeps_output
        whole = state.spec.wgrad and not state.spec.blocks and model.tp.size == 1
        self._fused = frozenset(fused) if whole else frozenset()
        self.gemms: dict[str, SiteGemm] = {}
        self._layers = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
        self._place()
        self.head = (
            Fp8Head(model, state.ranks, kernels=state.kernels, fuse_wgrad=fuse_wgrad) if head else None
        )
        if self.head is not None:
            model.ops = self.head.in_place_of(model.ops, in_chunks="linear_cross_entropy" in fused)
        self._stale = self._unwritten = True
        self._uncast: set[str] = set()  # parts of the model whose weights are cast once they have arrived

    def begin_step(self, *, looks: bool = False) -> None:
        """Before the first forward of a step, once the gradients are zero.

        looks: count what the casts of this step lose, for the state's table.
        """
        self.state.looks = looks
        if self.head is not None:
            self.head.begin_step(looks=looks)
        if looks:  # weights are cast again, to be counted
            self._stale = self._unwritten = True
        self._cast_stale()
        for gemm in self.gemms.values():
            gemm.fresh = True

    def prepare(self) -> None:
        """Before the first forward of an evaluation."""
        self.state.keep_inputs()
        self._cast_stale()

    def _cast_stale(self) -> None:
        """Cast the weights, if they have changed since. Those still on their way are cast as they arrive."""
        if not self._stale:
            return
        if self._params is not None and self._unwritten:
            self._params.publish()
        self._stale = self._unwritten = False
        self._uncast = {*self._layers, "head"}
        if self._arrival is None:
            for part in (*self._layers, "head"):
                self._cast(part)

    def _before(self, part: str) -> None:
        """The model is about to read this part's parameters."""
        assert self._arrival is not None
        self._arrival(part)
        self._cast(part)

    def _cast(self, part: str) -> None:
        if part not in self._uncast:
            return
        self._uncast.remove(part)
        for site, gemm in self.gemms.items():
            if site.startswith(f"{part}."):
                gemm.refresh()
        if part == "head" and self.head is not None:
            self.head.refresh()

    def step(self) -> dict[str, Operand]:
        """After the optimizer's update: renew the scales; the cast weights are out of date.

        Weights that are stored in fp8 are cast here, before they are gathered.

        Returns the sites that return to bf16 for good, each with an operand that saturated too often.
        """
        self.state.step()
        if self.head is not None:
            self.head.step()
        self._stale = True
        if self._params is not None:
            self._params.write()
        if self.state.spec.patience == NEVER:
            return {}
        found = {site: operand for site, operand in self.state.impatient() if site in self.gemms}
        self._return(found)
        return found

    def keep_in_bf16(self, sites: Iterable[str]) -> None:
        """Have these sites run in bf16, which returned to it in an earlier part of the run.

        Raises: CheckpointError where the weight of one exists in fp8 alone here.
        """
        found = [site for site in sites if site in self.gemms]
        if found and self._params is not None:
            raise CheckpointError(
                f"the checkpoint's run took {found[0]} back to bf16.",
                "here the weights of GEMMs in fp8 are stored in fp8 alone.",
                "add --no-fp8-param-gather, or --fp8-return-to-bf16 as that run had; --finetune begins anew.",
            )
        self._return(found)

    def table(self) -> list[Fp8Row]:
        """Of the newest step that was looked at: see Fp8State.table; the head comes last."""
        return [*self.state.table(), *(self.head.state.table() if self.head is not None else ())]

    @property
    def copies_bytes(self) -> int:
        """Bytes of the casts of weights that are held beside the weights."""
        casts = [cast for gemm in self.gemms.values() for cast in gemm.casts]
        casts += [] if self.head is None else [self.head.q_VH, self.head.q_HV]
        return sum(cast.nbytes for cast in casts)

    @property
    def returned(self) -> list[str]:
        """The sites that run in bf16 because they saturated too often."""
        return [site for site in self.state.sites if site not in self.gemms]

    def _return(self, sites: Collection[str]) -> None:
        for site in sites:
            del self.gemms[site]
        for name in {site.rsplit(".", 2)[0] for site in sites}:
            self._place_layer(name, self._layers[name])

    def forget(self) -> None:
        """After an evaluation: its inputs say nothing about training's, its weights are the next step's."""
        self.state.forget_inputs()

    def _place(self) -> None:
        """Find the linears of the state's sites, and put each where the model calls it."""
        for name, layer in self._layers.items():
            assert isinstance(layer, Block)
            linears = {"attention.qkv": layer.attention.qkv, "attention.proj": layer.attention.proj}
            linears |= {"mlp.fc1": layer.mlp.fc1, "mlp.fc2": layer.mlp.fc2}
            for part, linear in linears.items():
                site = f"{name}.{part}"
                if site in self.state.sites and self.state.spec.blocks:
                    self.gemms[site] = BlockGemm(site, linear, self.state)
                elif site in self.state.sites:
                    shares = self._shares(part)
                    self.gemms[site] = Fp8Gemm(site, linear, self.state, copies=self._copies, shares=shares)
            self._place_layer(name, layer)

    def _shares(self, part: str) -> dict[str, Group]:
        """Of which operands each tensor-parallel rank casts its own rows."""
        operand = "x" if part in COLUMNS else "dy"
        return {operand: self._tp.group} if self._linked else {}

    def _place_layer(self, name: str, layer: nn.Module) -> None:
        assert isinstance(layer, Block)
        self._place_attention(f"{name}.attention", layer.attention)
        self._place_mlp(f"{name}.mlp", layer.mlp)

    def _place_attention(self, name: str, attention: SelfAttention) -> None:
        norm, rebuild = attention.norm, attention.rebuilds_norm
        attention.qkv_site = self._after_norm(f"{name}.qkv", norm, attention.qkv, rebuild)
        attention.proj_site = self._row(f"{name}.proj", None, attention.proj, False, again=self._keeps_output)

    def _place_mlp(self, name: str, mlp: MLP) -> None:
        fc1, fc2 = (self.gemms.get(f"{name}.{part}") for part in ("fc1", "fc2"))
        rebuilds = mlp.rebuilds
        mlp.whole = None
        fused = {"norm", "activation"} <= self._fused
        if fused and isinstance(fc1, Fp8Gemm) and isinstance(fc2, Fp8Gemm):
            whole = Fp8Mlp(mlp.norm, fc1, fc2, mlp.activation.form, rebuilds)
            mlp.whole = whole if self._token is None else whole.opaque(self._token, dropped=mlp.dropped)
        norm, activation, dropped = mlp.norm, mlp.activation, mlp.dropped
        mlp.fc1_site = self._after_norm(f"{name}.fc1", norm, mlp.fc1, rebuilds["layernorm"], dropped=dropped)
        mlp.fc2_site = self._row(f"{name}.fc2", activation, mlp.fc2, rebuilds["activation"], dropped=dropped)

    def _after_norm(
        self, name: str, norm: Norm, linear: Linear, rebuild: bool, *, dropped: bool = False
    ) -> Prologue:
        gemm = self.gemms.get(name)
        if isinstance(gemm, Fp8Gemm) and "norm" in self._fused:
            site = Fp8NormSite(norm, gemm, rebuild=rebuild)
            return site if self._token is None else site.opaque(self._token, dropped=dropped)
        return self._column(name, norm, linear, rebuild, dropped=dropped)

    def _column(
        self, name: str, prologue: Prologue, linear: Linear, rebuild: bool, *, dropped: bool
    ) -> Prologue:
        """The site of a GEMM of which tensor-parallel ranks hold some output features each."""
        gemm = self.gemms.get(name)
        if gemm is None:
            return Site(prologue, linear, rebuild=rebuild)
        if self._linked and isinstance(gemm, Fp8Gemm):
            return LinkedSite(prologue, gemm, self._tp, column=True, rebuild=rebuild)
        before = prologue if self._tp.size == 1 else partial(_both, prologue, self._tp.enter)
        return self._site(before, gemm, rebuild, dropped)

    def _row(
        self,
        name: str,
        prologue: Prologue | None,
        linear: Linear,
        rebuild: bool,
        *,
        dropped: bool = False,
        again: bool = False,
    ) -> Prologue:
        """The site of a GEMM of which tensor-parallel ranks hold some input features each."""
        gemm = self.gemms.get(name)
        if gemm is None:
            return Site(prologue, linear, rebuild=rebuild)
        if self._linked and isinstance(gemm, Fp8Gemm):
            return LinkedSite(prologue, gemm, self._tp, column=False, rebuild=rebuild, again=again)
        site = self._site(prologue, gemm, rebuild, dropped, again)
        return site if self._tp.size == 1 else partial(_both, site, self._tp.leave)

    def _site(
        self, prologue: Prologue | None, gemm: SiteGemm, rebuild: bool, dropped: bool, again: bool = False
    ) -> Fp8Site:
        how = {"fuse_wgrad": self._fuse_wgrad, "rebuild": rebuild, "dropped": dropped, "again": again}
        return Fp8Site(prologue, gemm, token=self._token, **how)


def _both(first: Prologue, second: Prologue, x: Tensor) -> Tensor:
    return second(first(x))
