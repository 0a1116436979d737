"""The root of the options, and what can be asked of all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from redline.config.attention import AttentionConfig
from redline.config.checkpoint import CheckpointConfig
from redline.config.compile import CompileConfig
from redline.config.data import DataConfig
from redline.config.flags import SET, Option, Section, Spelling, options_of
from redline.config.kernels import KernelsConfig
from redline.config.logging import LoggingConfig
from redline.config.model import ModelConfig
from redline.config.moe import MoeConfig
from redline.config.mtp import MtpConfig
from redline.config.optim import OptimConfig
from redline.config.overlap import OverlapConfig
from redline.config.parallel import ParallelConfig
from redline.config.precision import PrecisionConfig
from redline.config.recompute import RecomputeConfig
from redline.config.runtime import RuntimeConfig
from redline.config.tokenizer import TokenizerConfig
from redline.config.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What the user said about a run. It is never written to; what follows from it is made in plan/."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


SECTIONS: dict[str, type[Section]] = {f.name: f.default_factory for f in fields(RunConfig)}  # type: ignore[misc]


@cache
def options() -> tuple[Option, ...]:
    """Every option, in the order of the help."""
    return tuple(option for section in SECTIONS.values() for option in options_of(section))


@cache
def options_by_field() -> Mapping[str, Option]:
    """Options by field name; a name occurs once in the whole tree."""
    table = {option.field: option for option in options()}
    assert len(table) == len(options()), "two options share a field name"
    return table


@cache
def spellings() -> Mapping[str, Spelling]:
    """Every flag there is, with the option it sets and the value it stands for."""
    table: dict[str, Spelling] = {}
    for option in options():
        for name, spelling in option.spellings():
            assert name not in table, f"{name} is spelled twice"
            table[name] = spelling
    return table


def value_of(config: RunConfig, name: str) -> Any:
    """The value of the option whose field is `name`."""
    return getattr(getattr(config, options_by_field()[name].section), name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with some options, by field name, replaced.

    Raises: InvalidConfigError when a value does not fit its field; KeyError for a name that is no option.
    """
    table = options_by_field()
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(table[name].section, {})[name] = value
    sections = {name: replace(getattr(config, name), **changed) for name, changed in by_section.items()}
    return replace(config, **sections)


def needed_by(option: Option) -> dict[str, Any]:
    """Values of other options, by field name, under which `option` has an effect."""
    needed: dict[str, Any] = {}
    for name, wanted in option.spec.needs.items():
        other = options_by_field()[name]
        value = wanted[0] if isinstance(wanted, tuple) else wanted
        needed |= {**needed_by(other), name: other.another_value() if value is SET else value}
    return needed


def differing(first: RunConfig, second: RunConfig) -> Iterable[str]:
    """Field names of the options in which two configurations differ."""
    return (name for name in options_by_field() if value_of(first, name) != value_of(second, name))


def notices(config: RunConfig) -> list[str]:
    """What to say once about options that ask for something Redline does anyway."""
    said = (option.notice(value_of(config, option.field)) for option in options())
    return [notice for notice in said if notice]
