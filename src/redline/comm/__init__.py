"""Process groups and collectives: PyTorch's c10d, laid out by the plan's rank grid."""

from redline.comm.groups import Group, Groups, open_groups, single_process

__all__ = ["Group", "Groups", "open_groups", "single_process"]
