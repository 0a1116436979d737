"""AdamW over flat buffers.

Loshchilov and Hutter 2019, "Decoupled weight decay regularization", arXiv 1711.05101. With gradient g,

    p = p (1 - lr weight_decay)
    m = beta1 m + (1 - beta1) g                    exp_avg
    v = beta2 v + (1 - beta2) g^2                  exp_avg_sq
    p = p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

`adamw_reference` is that in plain PyTorch (adam_torch.py). The fast paths are PyTorch's own fused kernel and
Redline's (adam_triton.py). Both divide the gradient by a device scalar (loss scale over clip coefficient) and
leave everything as it is when another device scalar says so: no pass over the gradients and no wait for the
host. States that are kept in host memory pass through the device, a chunk at a time (host_states.py), and
are updated there by the same kernel, to the same bits.
"""

from __future__ import annotations

from typing import Protocol

from redline.optim.adam_options import AdamImpl, AdamOptions, Step
from redline.optim.adam_torch import TorchUpdate
from redline.optim.adam_triton import TritonUpdate
from redline.optim.flat import FlatBuffers
from redline.optim.host_states import HostStates


class Update(Protocol):
    """An implementation over a list of buffers."""

    def begin(self, step: Step) -> None:
        """What all buffers of a step share."""

    def apply(self, index: int) -> None:
        """Update buffer `index`: its main parameters and moments in place, its parameters their rounding."""


class AdamW:
    """The update of all trainable parameters of `buffers`, in place.

    Args:
        overlap: states in host memory travel while others are updated, on streams of their own.

    Attributes:
        ran: the implementation that runs, which "auto" leaves to PyTorch ("fused").
    """

    def __init__(self, buffers: FlatBuffers, options: AdamOptions, *, overlap: bool = True) -> None:
        self.options = options
        self.ran: AdamImpl = "fused" if options.impl == "auto" else options.impl
        shards = [shard for shard in buffers.shards if shard.trainable]
        here = [shard for shard in shards if not shard.away]
        self.away = HostStates([shard for shard in shards if shard.away], buffers.device, overlap=overlap)
        self._here, updated = len(here), [*here, *self.away.buffers]
        self.update: Update = (
            TritonUpdate(updated, options)
            if self.ran == "triton"
            else TorchUpdate(updated, options, buffers.main_dtype)
        )

    def step(self, step: Step) -> None:
        """Apply one update to the main parameters, and round them into the parameters."""
        self.update.begin(step)
        for index in range(self._here):
            self.update.apply(index)
        self.away.run(lambda index: self.update.apply(self._here + index))
