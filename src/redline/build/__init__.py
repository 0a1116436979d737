"""The only room that knows both what was asked for and the objects that do it."""

from redline.build.assemble import Assembly, assemble
from redline.build.device import open_device

__all__ = ["Assembly", "assemble", "open_device"]
