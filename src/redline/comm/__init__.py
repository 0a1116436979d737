"""Process groups and collectives: PyTorch's c10d, laid out by the plan's rank grid.

groups.py       the groups of a run, passed to whoever communicates
collectives.py  collectives along one axis, at once or as a handle
pairs.py        the same with gradients
transport.py    collectives in place on flat buffers: what data parallelism sends by
start.py        several processes become one run; agree.py: how they decide together
elastic.py      processes started and restarted by torch elastic; progress.py: where each stands;
                watchdog.py: a rank that dies or hangs is named; pace.py: how long it works by itself;
                flight.py: what it sent last
linked_gemm.py  a collective and a GEMM as one: plain, or in pieces
"""

from redline.comm.agree import every, first_then_all, from_first, gathered, largest, together
from redline.comm.flight import write_flight_record
from redline.comm.groups import Group, Groups, open_groups, single_process
from redline.comm.pace import Pace
from redline.comm.progress import Progress
from redline.comm.start import Meeting, World, close_world, open_world
from redline.comm.transport import Collectives, Done, Sent, Transport, Work
from redline.comm.watchdog import Watchdog

__all__ = [
    "Collectives",
    "Done",
    "Group",
    "Groups",
    "Meeting",
    "Pace",
    "Progress",
    "Sent",
    "Transport",
    "Work",
    "Watchdog",
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
    "write_flight_record",
]
