"""Along which axis a collective runs, by what its process group is called."""

from __future__ import annotations

import re
from collections.abc import Iterable

_GROUP_WORDS = (
    ("ep", {"expert", "ep"}),
    ("pp", {"pipeline", "pp", "embedding"}),
    ("dp", {"data", "dp", "fsdp", "shard", "replicate"}),  # Megatron's DATA_PARALLEL_GROUP_WITH_CP is one
    ("cp", {"context", "cp"}),
    ("tp", {"tensor", "tp", "model"}),
)


def group_of(description: str, collective: str, sends: str = "pp") -> str:
    """tp, dp, cp, pp, ep or "collective", from a process group's description and the collective's name.

    Args:
        sends: the group of sends and receives that do not name theirs, see `sends_of`.
    """
    words = set(re.split("[^a-z]+", description.lower()))
    named = next((group for group, parts in _GROUP_WORDS if words & parts), None)
    if named is not None:
        return named
    return sends if any(part in collective.lower() for part in ("send", "recv")) else "collective"


def sends_of(descriptions: Iterable[str]) -> str:
    """Along which axis a rank sends to single others, from the descriptions of its groups of several ranks.

    Between stages where there are any, around a ring of context ranks, else to tensor-parallel ones
    (`--tp-comm-overlap`): neither gloo's events nor NCCL's kernels of such sends say it themselves.
    """
    groups = {group_of(each, "") for each in descriptions}
    return next((axis for axis in ("pp", "cp", "tp") if axis in groups), "pp")
