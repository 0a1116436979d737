"""Weights that exist in fp8 alone (`--fp8-param-gather`): cast by their owners, gathered as bytes.

    main parameter (own part) -> compute dtype -> fp8 by the weight's scale -> all-gather of a byte each

The same bits as a gather in the compute dtype with a cast of the whole afterwards: each value is rounded by
itself, and the scale is the one that all ranks have, from histories that they share or, where tensors are
measured, from the largest value over all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from redline.comm import Group
from redline.comm.collectives import all_reduce
from redline.kernels import fp8
from redline.precision.fp8 import Fp8State, Purpose

Part = tuple[Tensor, Tensor]  # main parameters [n], and where their fp8 values belong [n]
WIDTH = 1024  # columns in which a flat part is cast


class Gatherer(Protocol):
    """Brings every rank's part of the parameters to all of them."""

    def start(self, *, at_once: bool = False) -> None: ...

    def finish(self) -> None: ...


class Fp8Params:
    """The weights of all sites of `state`, of which each rank of `group` casts the parts it updates.

    Args:
        parts: what this rank updates of each site's weight; the same sites on every rank.
        compute_dtype: what main parameters are rounded to first, as a weight in 16 bits would be.
    """

    def __init__(
        self,
        state: Fp8State,
        parts: Mapping[str, Sequence[Part]],
        group: Group,
        gatherer: Gatherer,
        compute_dtype: torch.dtype,
    ) -> None:
        assert tuple(parts) == state.sites
        self._state, self._parts, self._group = state, parts, group
        self._gatherer, self._compute_dtype = gatherer, compute_dtype

    @torch.no_grad()
    def write(self) -> None:
        """Cast this rank's parts, after an update; the gatherer is to send them."""
        if self._state.measures:
            self._measure()
        for site, parts in self._parts.items():
            scaling = self._state.scaling(site, "w")
            for main, target in parts:
                rows = self._rows(main)

                def run(
                    scale: Tensor,
                    amax: Tensor,
                    purpose: Purpose,
                    rows: Tensor = rows,
                    to: torch.dtype = target.dtype,
                ) -> tuple[Tensor]:
                    return (fp8.cast(rows, scale, amax, to, True, False, self._state.kernels)[0],)

                (q,), _ = self._state.casting(scaling, run, measured=True)
                target.copy_(q.flatten())

    def publish(self) -> None:
        """Cast this rank's parts and bring them to every rank, at once."""
        self._gatherer.finish()
        self.write()
        self._gatherer.start(at_once=True)

    def _measure(self) -> None:
        """Scales of all weights from their largest values, over the parts of all ranks."""
        state = self._state
        amax, one = (
            torch.zeros(len(state.sites), device=state.scale.device),
            torch.ones_like(state.scale[0, :1]),
        )
        for index, parts in enumerate(self._parts.values()):
            for main, target in parts:
                rows, found = self._rows(main), amax[index : index + 1]
                fp8.cast(rows, one, found, target.dtype, False, False, state.kernels)
        state.measure_weights(all_reduce(amax, self._group, "max"))

    def _rows(self, main: Tensor) -> Tensor:
        """[n] as [n / c, c] in the compute dtype, on the device."""
        return main.to(self._state.scale.device).to(self._compute_dtype).view(-1, gcd(main.numel(), WIDTH))
