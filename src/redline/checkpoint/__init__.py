"""Saved training state: safetensors and JSON, planned and resharded by torch.distributed.checkpoint."""

from redline.checkpoint.folders import (
    LATEST,
    Found,
    find_iteration,
    find_latest,
    folder_name,
    list_checkpoints,
)
from redline.checkpoint.load import load_checkpoint
from redline.checkpoint.manifest import find_damage, read_manifest
from redline.checkpoint.reader import read_metadata, read_values
from redline.checkpoint.save import AsyncWriter, SaveReport, save_checkpoint
from redline.checkpoint.values import ABSENT, Difference, compare_values

__all__ = [
    "ABSENT",
    "LATEST",
    "AsyncWriter",
    "Difference",
    "Found",
    "SaveReport",
    "compare_values",
    "find_damage",
    "find_iteration",
    "find_latest",
    "folder_name",
    "list_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "read_metadata",
    "read_values",
    "save_checkpoint",
]
