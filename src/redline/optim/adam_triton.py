"""AdamW by Redline's kernel: one pass over each flat buffer, the rounded parameters written in the same pass.

Gradients and moments are read in the dtype in which they are stored; clipping, loss scale and skip flag are
device scalars that the kernel reads. adam.py says what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from redline.kernels.adamw import FlatState, Hyper, Segments, adamw_, adamw_hyper, make_segments
from redline.kernels.grad_norm import grad_statistics
from redline.optim.adam_options import AdamOptions, Step
from redline.optim.buffer import Buffer
from redline.optim.groups import Group, segments
from redline.optim.states import is_fp8


class TritonUpdate:
    """The update of trainable `buffers`, in place."""

    def __init__(self, buffers: Sequence[Buffer], options: AdamOptions) -> None:
        self._options = options
        self._groups: list[Group] = []
        self._states = [(_state(buffer), self._segments(buffer)) for buffer in buffers]
        self._hyper: Hyper | None = None
        self._grad_factor: Tensor | None = None
        self._found_inf: Tensor | None = None

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

    def begin(self, step: Step) -> None:
        """Bring the step's hyperparameters to the device."""
        if not self._states:
            return
        self._hyper = adamw_hyper(
            step=step.number,
            lr=[step.rate(group) for group in self._groups],
            weight_decay=[step.decay(group) for group in self._groups],
            beta1=self._options.beta1,
            beta2=self._options.beta2,
            eps=self._options.eps,
            device=self._states[0][0].param.device,
        )
        self._grad_factor = None if step.grad_scale is None else step.grad_scale.reciprocal()
        self._found_inf = step.found_inf

    def apply(self, index: int) -> None:
        """Update one buffer."""
        state, table = self._states[index]
        if table is not None:
            assert self._hyper is not None
            adamw_(
                state,
                self._hyper,
                table,
                grad_factor=self._grad_factor,
                found_inf=self._found_inf,
                impl="triton",
            )


def _state(buffer: Buffer) -> FlatState:
    found = buffer.tensors
    param, main = found["param"], found["main_param"]
    if is_fp8(param):  # cast from the main parameters afterwards, by whoever knows the scales
        param = main
    return FlatState(
        param,
        found["main_grad"],
        found["exp_avg"],
        found["exp_avg_sq"],
        None if main is param else main,
        found.get("exp_avg_top"),
        found.get("exp_avg_sq_top"),
    )


def norm_and_nonzeros(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(Euclidean norm, number of elements that are not 0) of all gradients, float64 scalars, in one read."""
    squares, _, nonzeros = grad_statistics(grads, impl="triton").unbind()
    return squares.sqrt(), nonzeros
