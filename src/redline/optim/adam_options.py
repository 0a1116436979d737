"""What one AdamW update is told: what stays the same, and what every step says anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from redline.errors import ConfigError
from redline.optim.groups import Group

AdamImpl = Literal["auto", "fused", "triton", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """What does not change from step to step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    impl: AdamImpl = "auto"

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(
                f"--adam-eps {self.eps} is not above 0.",
                "an element whose gradients were all zero would be updated by 0/0.",
                "use 1e-8, or another small positive number.",
            )
        for flag, beta in (("--adam-beta1", self.beta1), ("--adam-beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(
                    f"{flag} {beta} is outside [0, 1).",
                    "it is the share of the running average that a step keeps.",
                    "use 0.9 for --adam-beta1 and 0.95 to 0.999 for --adam-beta2.",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Update number `number` (from 1).

    Attributes:
        lr, weight_decay: of this step.
        decoupled_lr: learning rate of word embedding and head; None means `lr`.
        grad_scale: device scalar that every gradient is divided by. The gradients may be left divided.
        found_inf: device scalar; where it is 1, parameters and moments stay as they are, bit for bit.
    """

    number: int
    lr: float
    weight_decay: float
    decoupled_lr: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def rate(self, group: Group) -> float:
        """The learning rate of a group of parameters."""
        return self.decoupled_lr if group.decoupled and self.decoupled_lr is not None else self.lr

    def decay(self, group: Group) -> float:
        """Its weight decay."""
        return self.weight_decay if group.decays else 0.0
