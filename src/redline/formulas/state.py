"""Bytes of what a rank holds all the time: parameters, main parameters, gradients and Adam's moments."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
REMAINDER_BYTES = 2  # beside a bf16 parameter: together the exact fp32 main parameter
CODE_BLOCK = 64  # elements of a moment in 8 bits that share 2 bytes
AWAY_CHUNK = 1 << 23  # elements of optimizer states that travel from and to host memory together


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Storage dtypes by name. Where `main` is `param`, main parameters are the parameters themselves.

    With `remainder`, a bf16 parameter and 16 more bits are the fp32 main parameter.

    `shards` ranks share main parameters and moments (the distributed optimizer), an equal part each.
    """

    param: str = "bf16"
    main: str = "fp32"
    grad: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    shards: int = 1
    remainder: bool = False

    def bytes_each(self) -> dict[str, int]:
        """Bytes a parameter by tensor class; 0 for main parameters that are no copy."""
        main = 0 if self.main == self.param else ITEM_BYTES[self.main]
        if self.remainder:
            main = REMAINDER_BYTES
        return {
            "weights": ITEM_BYTES[self.param],
            "main_params": main,
            "main_grads": ITEM_BYTES[self.grad],
            "exp_avg": ITEM_BYTES[self.exp_avg],
            "exp_avg_sq": ITEM_BYTES[self.exp_avg_sq],
        }


SHARDED = ("main_params", "exp_avg", "exp_avg_sq")  # by a distributed optimizer (ZeRO-1)


def bytes_per_parameter(dtypes: StateDtypes, dp: int = 1, distributed_optimizer: bool = False) -> float:
    """Bytes of state a rank holds for each parameter of its model shard.

    bf16 with fp32 gradients and Adam: 18 bytes, or 6 + 12/dp under the distributed optimizer.
    """
    shards = dp if distributed_optimizer else 1
    each = dtypes.bytes_each()
    return sum(size / (shards if name in SHARDED else 1) for name, size in each.items())


def state_bytes(
    elements: int, dtypes: StateDtypes, dp: int = 1, distributed_optimizer: bool = False
) -> dict[str, int]:
    """Bytes by tensor class for `elements` stored elements (alignment padding included)."""
    shards = dp if distributed_optimizer else dtypes.shards
    return {
        name: size * (-(-elements // shards) if name in SHARDED else elements)
        for name, size in dtypes.bytes_each().items()
    }
