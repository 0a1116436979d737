"""Learning rate and weight decay as pure functions of the samples that successful steps have consumed.

Megatron's definitions. Everything is counted in samples, so that a change of batch size does not bend the
curve. A step's rate is the function at the samples consumed *before* it: the first step of a warm-up runs at
`lr_warmup_init`. A skipped step does not advance the count.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redline.plan.rules import broken

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncrStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Warm-up, then decay. All lengths in samples (a fraction of a decay may give a broken number)."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: DecayStyle = "constant"
    warmup: float = 0.0
    decay: float = 1.0
    wsd_style: WsdStyle = "exponential"
    wsd_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.decay <= 0 or self.warmup >= self.decay:
            raise broken(
                "warmup-before-decay",
                f"the learning-rate warm-up of {self.warmup:g} samples does not end before the decay at "
                f"{self.decay:g} samples.",
                "the rate first rises over the warm-up and then decays over what is left.",
                "shorten --lr-warmup-iters, -samples or -fraction, or lengthen --lr-decay-iters (which is "
                "the whole run by default).",
            )
        if not 0 <= self.min_lr <= self.max_lr or not 0 <= self.init_lr <= self.max_lr:
            raise broken(
                "rates-ordered",
                f"--min-lr {self.min_lr:g} and --lr-warmup-init {self.init_lr:g} must lie between 0 and "
                f"--lr {self.max_lr:g}.",
                "they are where the rate ends and where its warm-up begins.",
                "lower them, or raise --lr.",
            )
        if self.style == "WSD" and not 0 < self.wsd_decay <= self.decay:
            raise broken(
                "wsd-length",
                f"--lr-decay-style WSD has a final decay of {self.wsd_decay:g} samples in {self.decay:g}.",
                "WSD holds the rate until its last part, whose length it must be told.",
                "set --lr-wsd-decay-iters (or -samples), at most the decay length.",
            )

    def lr(self, samples: float) -> float:
        """The rate after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(samples, 1)))
        return self.min_lr + self._share(samples) * (self.max_lr - self.min_lr)

    def _share(self, samples: float) -> float:
        """How much of max_lr - min_lr is left, 1 to 0."""
        if self.style == "WSD":
            start = self.decay - self.wsd_decay
            return 1.0 if samples <= start else _fall(self.wsd_style, (samples - start) / self.wsd_decay)
        return _fall(self.style, (samples - self.warmup) / (self.decay - self.warmup))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecaySchedule:
    """From `start` to `end` over `length` samples."""

    start: float
    end: float
    style: IncrStyle = "constant"
    length: float = 1.0

    def __post_init__(self) -> None:
        if self.style == "constant" and self.start != self.end:
            raise broken(
                "weight-decay-ends",
                f"--start-weight-decay {self.start:g} and --end-weight-decay {self.end:g} differ under "
                "--weight-decay-incr-style constant.",
                "a constant weight decay has one value.",
                "use --weight-decay-incr-style linear or cosine, or give --weight-decay alone.",
            )

    def weight_decay(self, samples: float) -> float:
        """The weight decay after `samples` samples."""
        if self.style == "constant" or samples > self.length:
            return self.end
        ratio = samples / self.length
        rise = ratio if self.style == "linear" else 0.5 * (1 - math.cos(math.pi * ratio))
        return self.start + rise * (self.end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """The schedules of a run.

    `decoupled` is the rate of word embedding and head, None when they follow `main`.
    """

    main: LrSchedule
    decay: WeightDecaySchedule
    decoupled: LrSchedule | None = None

    def lr(self, samples: float) -> float:
        """The learning rate after `samples` samples."""
        return self.main.lr(samples)

    def decoupled_lr(self, samples: float) -> float | None:
        """The rate of word embedding and head, None when they follow `lr`."""
        return None if self.decoupled is None else self.decoupled.lr(samples)

    def weight_decay(self, samples: float) -> float:
        """The weight decay after `samples` samples."""
        return self.decay.weight_decay(samples)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what a checkpoint keeps, to tell on resuming which schedule it was trained by."""
        return asdict(self)


def _fall(style: str, ratio: float) -> float:
    """A curve from 1 at ratio 0 to 0 at ratio 1."""
    if style == "linear":
        return 1 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1)
    if style == "exponential":
        return 2 * math.exp2(-ratio) - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(ratio)
