"""TOML configs, run folders and Megatron's YAML, as launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from redline.config.flags import UNSET, to_flag
from redline.config.launch.attribute import Attributed
from redline.config.launch.bash import read_bytes
from redline.config.launch.launch import Assumption, FlagUse, Launch
from redline.config.launch.megatron_names import LAUNCH_KEYS, NODE_KEYS, PROCESS_KEYS, SWITCHES, VALUED
from redline.config.launch.yaml import Leaf, leaves
from redline.config.layers import Layer
from redline.config.problems import Problem, nearest
from redline.config.toml import plain, read_layer
from redline.config.tree import RunConfig, spellings
from redline.errors import DataError

Finish = Callable[[Layer, Iterable[str]], tuple[RunConfig, frozenset[str], list[Problem]]]
VARIABLE = re.compile(r"\$\{(?:oc\.env:)?([A-Za-z_]\w*)(?:,([^}]*))?\}")


def read_run_folder(path: Path, finish: Finish) -> Launch:
    """A run's folder, by the config.toml that the run wrote there.

    Raises: DataError when there is none; ConfigError when it is no TOML.
    """
    config = path / "config.toml"
    if not config.is_file():
        raise DataError(
            f"{path} is no run's folder.",
            "a run writes its configuration there as config.toml, and there is none.",
            "name the folder that --save names, or a launch script.",
        )
    return _toml(path, config, "run-folder", finish)


def read_toml(path: Path, finish: Finish) -> Launch:
    """A Redline config.

    Raises: DataError when it cannot be read; ConfigError when it is no TOML.
    """
    return _toml(path, path, "toml", finish)


def _toml(path: Path, file: Path, kind: Any, finish: Finish) -> Launch:
    text = read_bytes(file).decode("utf-8", "replace")
    try:
        layer = read_layer(file)
    except RecursionError as exc:
        raise DataError(f"{file} is nested too deeply.", "no config is.", "correct it.") from exc
    uses = []
    for line, content in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*(?:[A-Za-z_]+\.)?"?([A-Za-z_][\w-]*)"?\s*=\s*(.*?)\s*$', content)
        if match is not None:
            uses.append(_use(match[1], match[2].strip("\"'"), file, line))
    config, stated, problems = finish(layer, ())
    return _launch(kind, path, config, stated, uses, problems, text)


def _use(key: str, value: str | None, file: Path, line: int) -> FlagUse:
    flag = to_flag(key)
    spelling = spellings().get(flag)
    if spelling is not None:
        return FlagUse(key, value, file, line, spelling.option.field, "understood", None)
    if flag in SWITCHES | VALUED:
        return FlagUse(key, value, file, line, None, "megatron-only", None)
    near = nearest(key, (name[2:].replace("-", "_") for name in (*spellings(), *SWITCHES, *VALUED)))
    return FlagUse(key, value, file, line, None, "unknown", near)


def read_yaml(path: Path, finish: Finish, set_values: Mapping[str, str]) -> Launch:
    """A Megatron YAML config (--yaml-cfg), or one of its relatives: keys are options at any depth.

    Raises: DataError when it cannot be read or is no YAML.
    """
    found = Attributed()
    text = read_bytes(path).decode("utf-8", "replace")
    yaml_into(path, found, set_values)
    if not found.uses:
        raise DataError(f"{path} states no option.", "it has no key with a value.", "name the config file.")
    open_fields = {use.field for use in found.uses if use.field and found.doubts.get(use.flag)}
    config, stated, problems = finish(found.layer, [name for name in open_fields if name])
    nodes, each = _count(found, NODE_KEYS), _count(found, PROCESS_KEYS)
    assumptions = [
        Assumption(
            name,
            path,
            hole.place.line,
            hole.why,
            tuple(flag for flag, other in found.doubts.items() if any(name in h.names for h in other)),
            (),
        )
        for doubtful in found.doubts.values()
        for hole in doubtful
        for name in hole.names
    ]
    launch = _launch("yaml", path, config, stated, found.uses, problems, text)
    world = nodes * each if nodes and each else None
    return _with_facts(launch, world, nodes, each, tuple(dict.fromkeys(assumptions)))


def _count(found: Attributed, names: frozenset[str]) -> int | None:
    values = [use.value for use in found.uses if use.flag in names and use.value]
    return int(values[0]) if values and values[0].isdecimal() and len(values[0]) < 8 else None


def yaml_into(path: Path, found: Attributed, set_values: Mapping[str, str]) -> None:
    """Add the options of a YAML file to what was found; what was found already counts more.

    Raises: DataError when it cannot be read or is no YAML.
    """
    before = dict(found.layer.values)
    for leaf in leaves(path):
        _leaf(leaf, path, found, set_values)
    found.layer.values |= before


def _leaf(leaf: Leaf, path: Path, found: Attributed, set_values: Mapping[str, str]) -> None:
    from redline.config.launch.values import Hole, Place

    value, missing = _substituted(leaf.value, set_values)
    shown = None if value is None else " ".join(map(_shown, value if isinstance(value, tuple) else (value,)))
    use = _use(leaf.key, shown, path, leaf.line)
    launch_key = leaf.key in LAUNCH_KEYS
    if use.state == "unknown" and launch_key:
        use = FlagUse(leaf.key, shown, path, leaf.line, None, "megatron-only", None)
    found.uses.append(use)
    if missing:
        why = "it comes from the environment."
        found.doubts.setdefault(leaf.key, []).extend(
            Hole((name,), Place(path, leaf.line), why) for name in missing
        )
        return
    spelling = spellings().get(to_flag(leaf.key))
    if spelling is None or value is None:
        return
    option = spelling.option
    if spelling.constant is UNSET:
        found.layer.put(leaf.key, spelling, _typed(option, value))
    elif value is True or (value is False and option.kind is bool and not spelling.shorthand):
        constant = spelling.constant if value is True else not spelling.constant
        found.layer.put(leaf.key, spelling, constant)


def _typed(option: Any, value: Any) -> Any:
    """A YAML value as the option's type: "1e-4" is a number, a number may be a word."""
    items = value if isinstance(value, tuple) else (value,)
    if option.kind is str:
        items = tuple(item if isinstance(item, str) else _shown(item) for item in items)
    elif option.kind is float or option.kind is int:
        items = tuple(_number(option.kind, item) for item in items)
    return plain(option, items if option.count not in (0, 1) else items[0] if items else None)


def _number(kind: type[Any], item: Any) -> Any:
    if not isinstance(item, str):
        return item
    try:
        return kind(item)
    except ValueError:
        return item


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _substituted(value: Any, set_values: Mapping[str, str]) -> tuple[Any, list[str]]:
    """A value with ${NAME} replaced by --set or its default; the names that remain."""
    if not isinstance(value, str) or "${" not in value:
        return value, []
    missing: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match[1] in set_values:
            return set_values[match[1]]
        if match[2] is not None:
            return match[2].strip()
        missing.append(match[1])
        return f"${match[1]}"

    return VARIABLE.sub(one, value), missing


def _launch(
    kind: Any,
    path: Path,
    config: RunConfig,
    stated: frozenset[str],
    uses: list[FlagUse],
    problems: list[Problem],
    text: str,
) -> Launch:
    return Launch(
        kind, path, config, stated, tuple(uses), {}, None, None, None, None, None, (), tuple(problems), text
    )


def _with_facts(
    launch: Launch,
    world: int | None,
    nodes: int | None,
    each: int | None,
    assumptions: tuple[Assumption, ...],
) -> Launch:
    from dataclasses import replace

    return replace(launch, world_size=world, nnodes=nodes, nproc_per_node=each, assumptions=assumptions)
