"""What reading a launch script (or a config) gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redline.config.launch.values import Place
from redline.config.problems import Problem
from redline.config.tree import RunConfig


@dataclass(frozen=True, slots=True)
class FlagUse:
    """One flag (or key) as somebody wrote it.

    Attributes:
        flag: as typed: "--tensor-model-parallel-size", a TOML or YAML key.
        value: its words joined by a space, None for a switch. What cannot be known reads "$NAME".
        file, line: where it stands; line is 1-based.
        field: the RunConfig field that it sets, None when it sets none.
        state: "understood", "megatron-only" (Megatron or a fork of it has it, Redline's tree has not), or
            "unknown".
        nearest: the known flag that an unknown one looks most like.
    """

    flag: str
    value: str | None
    file: Path
    line: int
    field: str | None
    state: Literal["understood", "megatron-only", "unknown"]
    nearest: str | None


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that the script alone does not settle; `--set NAME=VALUE` does.

    Attributes:
        name: the variable, or the construct when there is no variable.
        why: one sentence.
        used_by: flags, facts of the launcher ("nnodes", "nproc_per_node", "world_size") and environment
            variables whose value depends on it.
        choices: values the script itself speaks of; one choice is the value that was taken.
    """

    name: str
    file: Path
    line: int
    why: str
    used_by: tuple[str, ...]
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A training launch as far as its files tell.

    Attributes:
        config: the options that are known; every other one has its default.
        stated: fields whose value the files state and which `config` therefore holds.
        flags: every flag, also those of branches that may not be taken.
        environment: exported variables that are known, each with the place that sets it.
        launcher: "torchrun", "torch.distributed.launch", "deepspeed", "mpirun", "srun", "accelerate" or
            "python".
        entry: the program that is started, for example "pretrain_gpt.py".
        problems: contradictory flags, bad values, old spellings, rules of the tree that are broken.
        text: the script as it stands in the file.
        cut_off: flags that bash takes for commands, because the line before them does not end in a backslash.
    """

    kind: Literal["bash", "toml", "yaml", "run-folder"]
    path: Path
    config: RunConfig
    stated: frozenset[str]
    flags: tuple[FlagUse, ...]
    environment: Mapping[str, tuple[str, Place]]
    world_size: int | None
    nnodes: int | None
    nproc_per_node: int | None
    launcher: str | None
    entry: str | None
    assumptions: tuple[Assumption, ...]
    problems: tuple[Problem, ...]
    text: str
    cut_off: tuple[FlagUse, ...] = ()

    @property
    def of_redline(self) -> bool:
        """Whether `redline train` is what it starts, so that its defaults hold."""
        return self.kind in ("toml", "run-folder") or is_redline(self.entry)

    @property
    def open_fields(self) -> frozenset[str]:
        """Fields that a flag may set, to a value that is not known: neither stated nor at their default."""
        open_flags = {flag for assumption in self.assumptions for flag in assumption.used_by}
        fields = {use.field for use in self.flags if use.flag in open_flags and use.field}
        return frozenset(fields - self.stated)


def is_redline(entry: str | None) -> bool:
    """Whether the program that a script starts is this one."""
    return "redline" in (entry or "").lower()
