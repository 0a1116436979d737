"""Loss scaling for fp16: a factor on the loss that keeps small gradients above fp16's underflow.

Micikevicius et al. 2018, "Mixed precision training", arXiv 1710.03740, section 3.2. The state is plain
numbers and lives on the host; the step reads it once and passes it on as a device scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from redline.errors import CheckpointError, ConfigError

GROWTH, BACKOFF = 2.0, 0.5


@dataclass(slots=True)
class ConstantLossScale:
    """A scale that never moves; 1 for bf16, fp32 and fp64."""

    scale: float = 1.0

    def expects_overflow(self) -> bool:
        """Whether non-finite gradients are part of normal running: never, as this scale cannot give way."""
        return False

    def update(self, found_inf: bool) -> None:
        """Nothing to learn."""

    def state_values(self) -> dict[str, float]:
        """Empty: the scale is the user's, not the run's."""
        return {}

    def load_state_values(self, values: Mapping[str, float]) -> None:
        """Ignore what a dynamic scale of an earlier run left behind."""


@dataclass(slots=True)
class DynamicLossScale:
    """Doubles after `window` clean steps in a row; halves on an overflow, from the `hysteresis`-th on.

    The hysteresis refills only when the scale grows, so a second overflow soon after the first that halved it
    halves it again. The scale never falls below `min_scale`.
    """

    scale: float = 2.0**32
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    clean_steps: int = field(default=0, init=False)
    hysteresis_left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.scale:
            raise ConfigError(
                f"--initial-loss-scale {self.scale:g} and --min-loss-scale {self.min_scale:g} do not fit.",
                "the scale starts at the first and falls no lower than the second, which is above 0.",
                "use --initial-loss-scale 4294967296 --min-loss-scale 1.",
            )
        if self.window < 1 or self.hysteresis < 1:
            raise ConfigError(
                f"--loss-scale-window {self.window} and --hysteresis {self.hysteresis} must be at least 1.",
                "they count clean steps before a growth and overflows before a back-off.",
                "use --loss-scale-window 1000 --hysteresis 2.",
            )
        self.hysteresis_left = self.hysteresis

    def expects_overflow(self) -> bool:
        """Whether an overflow now is part of finding the scale: yes, until the floor is reached."""
        return self.scale > self.min_scale

    def update(self, found_inf: bool) -> None:
        """Take in whether this step's gradients overflowed."""
        if found_inf:
            self.clean_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.scale = max(self.scale * BACKOFF, self.min_scale)
            return
        self.clean_steps += 1
        if self.clean_steps >= self.window:  # above it: counted under a larger window, before a resume
            self.clean_steps = 0
            self.hysteresis_left = self.hysteresis
            self.scale *= GROWTH

    def state_values(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {
            "scale": self.scale,
            "clean_steps": self.clean_steps,
            "hysteresis_left": self.hysteresis_left,
        }

    def load_state_values(self, values: Mapping[str, float]) -> None:
        """Go on from `state_values`; an empty one (the earlier run scaled nothing) keeps the initial state.

        Window and hysteresis are of this run, also where they are smaller than those the values come from.

        Raises: CheckpointError when a value is missing.
        """
        if not values:
            return
        missing = self.state_values().keys() - values.keys()
        if missing:
            raise CheckpointError(
                f"the checkpoint's loss scale lacks {', '.join(sorted(missing))}.",
                "the scaler cannot go on from half of its state.",
                "load another checkpoint, or start the optimizer afresh with --no-load-optim.",
            )
        self.scale = max(float(values["scale"]), self.min_scale)
        self.clean_steps = int(values["clean_steps"])
        self.hysteresis_left = min(int(values["hysteresis_left"]), self.hysteresis)


LossScale = ConstantLossScale | DynamicLossScale


def make_loss_scale(
    *,
    loss_scaling: bool,
    loss_scale: float | None = None,
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    window: int = 1000,
    hysteresis: int = 2,
) -> LossScale:
    """A run's scaler: constant where `loss_scale` is given, dynamic where the recipe needs one, else 1."""
    if loss_scale is not None:
        return ConstantLossScale(loss_scale)
    if loss_scaling:
        return DynamicLossScale(initial_scale, min_scale, window, hysteresis)
    return ConstantLossScale()
