"""The only room that knows both what was asked for and the objects that do it."""

from redline.build.assemble import Assembly, assemble, attention_request, choose_attention
from redline.build.communication import set_communication
from redline.build.compile import CompileLog, compile_blocks, compile_failure_explained
from redline.build.device import open_device

__all__ = [
    "Assembly",
    "CompileLog",
    "assemble",
    "attention_request",
    "choose_attention",
    "compile_blocks",
    "compile_failure_explained",
    "open_device",
    "set_communication",
]
