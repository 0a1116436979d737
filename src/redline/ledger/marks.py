"""Names of the regions that a profiled step is marked with, and what marks of other trainers mean.

step/profile.py writes `redline:<key>=<value>`:

    step        number of the step: from the wait for its data to the end of its periodic actions
    phase       forward, backward, recompute, optimizer
    layer       index of the block
    module      inside a block attention, attention.norm, attention.qkv, core_attention, mlp.fc1, ...;
                outside embedding, final_norm, head
    region      any other part of a step
    host        what the host does besides: data, logging, checkpoint, evaluation
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from redline.ledger.trace import MODULE_CALL

PREFIX = "redline:"
Key = Literal["step", "phase", "layer", "module", "region", "host"]

NUMBERED = ("step", "layer")

# Marks that PyTorch itself and common trainers write.
_FOREIGN: tuple[tuple[re.Pattern[str], Key, str], ...] = (
    (re.compile(r"ProfilerStep#(\d+)"), "step", r"\1"),
    (re.compile(r"Optimizer\.(step|zero_grad)#.*"), "phase", "optimizer"),
    (re.compile(r"enumerate\(DataLoader\).*|.*DataLoaderIter.*__next__.*"), "host", "data"),
    (re.compile(re.escape(MODULE_CALL) + r"\w*?(?:Layer|Block)_(\d+)"), "layer", r"\1"),
    (re.compile(re.escape(MODULE_CALL) + r"(\w+?)(?:_\d+)?"), "module", r"\1"),
)


def mark(key: Key, value: object) -> str:
    """The name of a region."""
    return f"{PREFIX}{key}={value}"


@cache
def read_mark(name: str) -> tuple[Key, str] | None:
    """(key, value) of a region's name, None for a name that says nothing."""
    if name.startswith(PREFIX):
        key, _, value = name[len(PREFIX) :].partition("=")
        if key in NUMBERED and not value.isdecimal():
            return None
        return key, value  # type: ignore[return-value]
    for pattern, key, value in _FOREIGN:
        if found := pattern.fullmatch(name):
            return key, found.expand(value)
    return None
