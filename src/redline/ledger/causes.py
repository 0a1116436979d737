"""Every cause of lost time: its account, its name in words, and the doctor's checks that may regain it.

The ids are data here: the doctor stands above this room, and a test of its own holds them to its registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.ledger.account import Account, Loss
from redline.ledger.kinds import Kind
from redline.ledger.places import Place


@dataclass(frozen=True, slots=True)
class Cause:
    """One possible bar of the waterfall."""

    account: Account
    words: str
    mends: tuple[str, ...] = ()


CAUSES: dict[str, Cause] = {
    "gemm": Cause("kernels", "matrix products below peak", ("RL012", "RL101", "RL103", "RL104", "RL105")),
    "attention": Cause("kernels", "attention below peak", ("RL002", "RL011", "RL102", "RL106")),
    "norm": Cause("kernels", "normalisation", ("RL001", "RL106")),
    "activation": Cause("kernels", "activation", ("RL001", "RL106")),
    "loss": Cause("kernels", "loss", ("RL107", "RL106")),
    "optimizer": Cause("kernels", "optimizer", ("RL104", "RL106")),
    "cast": Cause("kernels", "casts and copies on the device", ("RL105", "RL115")),
    "other": Cause("kernels", "other kernels", ("RL001", "RL106", "RL112")),
    "tp": Cause("communication", "exposed tensor-parallel collectives", ("RL006", "RL205", "RL210")),
    "dp": Cause("communication", "exposed data-parallel collectives", ("RL005", "RL209", "RL211")),
    "cp": Cause("communication", "exposed context-parallel collectives", ("RL208",)),
    "pp": Cause("communication", "pipeline: bubble and exposed sends", ("RL010", "RL206", "RL215")),
    "ep": Cause("communication", "exposed expert-parallel collectives", ("RL213", "RL219")),
    "collective": Cause("communication", "exposed collectives", ("RL005", "RL209", "RL210")),
    "recompute": Cause("memory", "recomputed work", ("RL301", "RL302", "RL309")),
    "allocator": Cause("memory", "allocator stalls", ("RL304", "RL308")),
    "offload": Cause("memory", "offload copies", ("RL307",)),
    "launch": Cause("host", "launch gaps", ("RL104", "RL408", "RL409")),
    "synchronisation": Cause("host", "waits for the device", ("RL402", "RL406")),
    "copies": Cause("host", "copies between host and device", ("RL404",)),
    "data": Cause("host", "waiting for data", ("RL404", "RL414")),
    "logging": Cause("host", "logging", ("RL401",)),
    "checkpoint": Cause("host", "checkpoint", ("RL403",)),
    "evaluation": Cause("host", "evaluation", ("RL407",)),
    "unknown": Cause("unknown", "unknown"),
}
HOST_REGIONS = ("data", "checkpoint", "evaluation", "logging")

_PLAIN: dict[Kind, str] = {
    "gemm": "gemm",
    "attention": "attention",
    "norm": "norm",
    "activation": "activation",
    "loss": "loss",
    "optimizer": "optimizer",
    "quantize": "cast",
    "cast": "cast",
    "copy": "cast",
}
# A module's name, or a part of it, that says whose its small kernels are.
# A site's small kernels are those of what runs before its product; casts of operands to 8 bits, and their
# transposes, are a kind of their own.
_MODULES = (
    ("norm", "norm"), ("qkv_site", "norm"), ("fc1_site", "norm"),
    ("activation", "activation"), ("fc2_site", "activation"), ("act_fn", "activation"),
    ("silu", "activation"), ("gelu", "activation"),
    ("loss", "loss"), ("head", "loss"), ("embedding", "other"),
)  # fmt: skip


def cause_of_work(kind: Kind, place: Place) -> str:
    """The cause that a compute kernel's time counts to: a key of CAUSES."""
    if place.host in HOST_REGIONS:
        return place.host
    if place.phase in ("recompute", "optimizer"):
        return place.phase
    module = place.module.lower()
    if "core_attention" in module:
        return "attention"
    if kind in ("gemm", "attention"):
        return kind
    if kind in ("elementwise", "reduce", "cast", "copy", "other"):
        named = next((cause for part, cause in _MODULES if part in module), None)
        if named is not None:
            return named
    return _PLAIN.get(kind, "other")


def make_losses(ms: Mapping[str, float], wall_ms: float, *, ideal_known: bool) -> tuple[Loss, ...]:
    """The bars of the waterfall in the order of CAUSES; `unknown` always has one."""
    return tuple(
        Loss(
            key=key,
            account=cause.account,
            cause=cause.words,
            ms=ms.get(key, 0.0),
            share=ms.get(key, 0.0) / wall_ms,
            points=100 * ms.get(key, 0.0) / wall_ms if ideal_known else None,
            mends=cause.mends,
        )
        for key, cause in CAUSES.items()
        if ms.get(key) or key == "unknown"
    )
