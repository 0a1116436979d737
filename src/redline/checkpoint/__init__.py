"""Saved training state: safetensors and JSON, planned and resharded by torch.distributed.checkpoint."""

from redline.checkpoint.folders import Found, find_iteration, find_latest, list_checkpoints
from redline.checkpoint.load import load_checkpoint
from redline.checkpoint.reader import read_metadata, read_values
from redline.checkpoint.save import AsyncWriter, SaveReport, save_checkpoint
from redline.checkpoint.values import ABSENT, Difference, compare_values

__all__ = [
    "ABSENT",
    "AsyncWriter",
    "Difference",
    "Found",
    "SaveReport",
    "compare_values",
    "find_iteration",
    "find_latest",
    "list_checkpoints",
    "load_checkpoint",
    "read_metadata",
    "read_values",
    "save_checkpoint",
]
