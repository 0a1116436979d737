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

    `shards` ranks share main parameters and moments (the distributed optimizer), an equal part each. The
    share `away` of a rank's part is in host memory, and passes through so many `stages` on the device.
    With `wide_sum` what other ranks send of gradients lies beside the own ones until it is added up.
    `snapshot_ranks` ranks copy an equal part of each checkpoint to host memory (0: none do), with the moments
    unless `snapshot_moments` is off.
    """

    param: str = "bf16"
    main: str = "fp32"
    grad: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    shards: int = 1
    remainder: bool = False
    away: float = 0.0
    stages: int = 2
    wide_sum: bool = False
    snapshot_ranks: int = 0
    snapshot_moments: bool = True

    def bytes_each(self) -> dict[str, float]:
        """Bytes a parameter by tensor class; 0 for main parameters that are no copy."""
        main = 0 if self.main == self.param else ITEM_BYTES[self.main]
        if self.remainder:
            main = REMAINDER_BYTES
        return {
            "weights": ITEM_BYTES[self.param],
            "main_params": main,
            "main_grads": ITEM_BYTES[self.grad],
            "exp_avg": _moment_bytes(self.exp_avg),
            "exp_avg_sq": _moment_bytes(self.exp_avg_sq),
        }


def _moment_bytes(dtype: str) -> float:
    """Of a moment; codes of 8 bits have 2 bytes more a block."""
    return ITEM_BYTES[dtype] + (2 / CODE_BLOCK if dtype == "fp8" else 0)


SHARDED = ("main_params", "exp_avg", "exp_avg_sq")  # by a distributed optimizer (ZeRO-1)


def optimizer_state_bytes(dtypes: StateDtypes) -> float:
    """Bytes a parameter of main parameters and moments, wherever they are."""
    each = dtypes.bytes_each()
    return sum(each[name] for name in SHARDED)


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
    """Bytes by tensor class for `elements` stored elements (alignment padding included), wherever it is."""
    shards = dp if distributed_optimizer else dtypes.shards
    return {
        name: round(size * (-(-elements // shards) if name in SHARDED else elements))
        for name, size in dtypes.bytes_each().items()
    }


def away_bytes(elements: int, dtypes: StateDtypes) -> dict[str, int]:
    """What of `state_bytes` is in host memory, by tensor class."""
    own = -(-elements // dtypes.shards)
    away = round(dtypes.away * own / CODE_BLOCK) * CODE_BLOCK
    return {name: round(size * away) for name, size in dtypes.bytes_each().items() if name in SHARDED}


def stage_bytes(elements: int, dtypes: StateDtypes) -> int:
    """Room on the device through which states pass that are in host memory."""
    away = sum(away_bytes(elements, dtypes).values())
    return min(away, dtypes.stages * round(AWAY_CHUNK * optimizer_state_bytes(dtypes)))
