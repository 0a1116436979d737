"""Process groups and collectives: PyTorch's c10d, laid out by the plan's rank grid.

groups.py       the groups of a run, passed to whoever communicates
collectives.py  collectives along one axis, at once or as a handle
pairs.py        the same with gradients
linked_gemm.py  a collective and a GEMM as one: plain, or in pieces
"""

from redline.comm.agree import every, first_then_all, from_first, gathered, largest, together
from redline.comm.groups import Group, Groups, open_groups, single_process
from redline.comm.start import Meeting, World, close_world, open_world

__all__ = [
    "Group",
    "Groups",
    "Meeting",
    "World",
    "close_world",
    "every",
    "first_then_all",
    "from_first",
    "gathered",
    "largest",
    "open_groups",
    "open_world",
    "single_process",
    "together",
]
