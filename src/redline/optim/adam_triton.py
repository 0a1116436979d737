"""AdamW by Redline's kernel: one pass over each flat buffer, the rounded parameters written in the same pass.

Gradients and moments are read in the dtype in which they are stored; clipping, loss scale and skip flag are
device scalars that the kernel reads. adam.py says what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from redline.kernels.adamw import FlatState, Segments, adamw_, adamw_hyper, make_segments
from redline.kernels.grad_norm import grad_statistics
from redline.optim.flat import Buffer
from redline.optim.groups import Group, segments


class TritonUpdate:
    """The update of all trainable `buffers`, in place.

    Args:
        beta1, beta2, eps: of AdamW.
    """

    def __init__(self, buffers: Sequence[Buffer], beta1: float, beta2: float, eps: float) -> None:
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._buffers = [buffer for buffer in buffers if buffer.trainable and buffer.slots]
        self._groups: list[Group] = []
        self._states = [(_state(buffer), self._segments(buffer)) for buffer in self._buffers]

    def _segments(self, buffer: Buffer) -> Segments | None:
        """The table of hyperparameters over a buffer; its groups are places in `self._groups`."""
        table = sorted(
            (start, group)
            for group, ranges in segments(buffer.slots, buffer.window).items()
            for start, _ in ranges
        )
        if not table:  # parameters without an element
            return None
        for _, group in table:
            if group not in self._groups:
                self._groups.append(group)
        param = buffer.tensors["param"]
        places = [self._groups.index(group) for _, group in table]
        return make_segments([start for start, _ in table], places, param.numel(), param.device)

    def step(
        self,
        step: int,
        *,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None,
        grad_factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Apply update number `step` (from 1), gradients multiplied by the device scalar `grad_factor`."""
        for state, table in self._states:
            if table is None:
                continue
            rates = [
                decoupled_lr if each.decoupled and decoupled_lr is not None else lr for each in self._groups
            ]
            hyper = adamw_hyper(
                step=step,
                lr=rates,
                weight_decay=[weight_decay if each.decays else 0.0 for each in self._groups],
                beta1=self._beta1,
                beta2=self._beta2,
                eps=self._eps,
                device=state.param.device,
            )
            adamw_(state, hyper, table, grad_factor=grad_factor, found_inf=found_inf, impl="triton")


def _state(buffer: Buffer) -> FlatState:
    found = buffer.tensors
    main = None if found["main_param"] is found["param"] else found["main_param"]
    return FlatState(found["param"], found["main_grad"], found["exp_avg"], found["exp_avg_sq"], main)


def norm_and_nonzeros(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(Euclidean norm, number of elements that are not 0) of all gradients, float64 scalars, in one read."""
    squares, _, nonzeros = grad_statistics(grads, impl="triton").unbind()
    return squares.sqrt(), nonzeros
