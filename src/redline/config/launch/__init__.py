"""Launch scripts, configs and run folders as `Launch`: `read_launch`.

Scripts are parsed by tree-sitter and read statically: nothing is ever executed.
"""

from redline.config.launch.launch import Assumption, FlagUse, Launch
from redline.config.launch.read import read_launch

__all__ = ["Assumption", "FlagUse", "Launch", "read_launch"]
