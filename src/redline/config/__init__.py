"""Options: one frozen typed tree, of which every command-line flag and TOML key is a field.

`parse_args` and `load_toml` make a RunConfig (with what was stated explicitly), `to_toml` prints one so
that it can be used again, `options` enumerates the fields, `check` holds a configuration against the rules.
"""

from redline.config.attention import AttentionConfig
from redline.config.checkpoint import CheckpointConfig
from redline.config.compile import CompileConfig
from redline.config.data import DataConfig, packs, split_shares
from redline.config.flags import MANY, SET, UNSET, Option
from redline.config.help import format_help
from redline.config.kernels import KernelsConfig
from redline.config.layers import Parsed, check
from redline.config.logging import LoggingConfig
from redline.config.model import ModelConfig
from redline.config.moe import MoeConfig
from redline.config.mtp import MtpConfig
from redline.config.optim import OptimConfig, offloaded_share
from redline.config.overlap import OverlapConfig
from redline.config.parallel import ParallelConfig
from redline.config.parse import parse_args
from redline.config.precision import PrecisionConfig
from redline.config.presets import DEMO_VOCAB_SIZE, PRESETS
from redline.config.problems import InvalidConfigError, Problem, raise_problems
from redline.config.recompute import RecomputeConfig
from redline.config.rules import RULES
from redline.config.runtime import Environment, RuntimeConfig, read_environment
from redline.config.tokenizer import TokenizerConfig
from redline.config.toml import from_dict, load_toml, to_dict, to_toml
from redline.config.train import TrainConfig, batch_schedule
from redline.config.tree import (
    SECTIONS,
    RunConfig,
    differing,
    needed_by,
    notices,
    options,
    value_of,
    with_values,
)

__all__ = [
    "DEMO_VOCAB_SIZE",
    "MANY",
    "PRESETS",
    "RULES",
    "SECTIONS",
    "SET",
    "UNSET",
    "AttentionConfig",
    "CheckpointConfig",
    "CompileConfig",
    "InvalidConfigError",
    "DataConfig",
    "Environment",
    "KernelsConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "MtpConfig",
    "OptimConfig",
    "Option",
    "OverlapConfig",
    "ParallelConfig",
    "Parsed",
    "PrecisionConfig",
    "Problem",
    "RecomputeConfig",
    "RunConfig",
    "RuntimeConfig",
    "TokenizerConfig",
    "TrainConfig",
    "batch_schedule",
    "check",
    "differing",
    "format_help",
    "from_dict",
    "load_toml",
    "needed_by",
    "offloaded_share",
    "notices",
    "options",
    "parse_args",
    "raise_problems",
    "read_environment",
    "packs",
    "split_shares",
    "to_dict",
    "to_toml",
    "value_of",
    "with_values",
]
