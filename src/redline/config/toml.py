"""TOML files: reading one as a layer, and writing a whole configuration so that it can be used again.

A key is a flag's name with underscores, under its section's table or at the top. A key that stands for one
value (`no_save_optim`, `swiglu`, `recompute_activations`) is true.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.config.flags import UNSET, Option, Spelling, to_flag
from redline.config.layers import Layer, Parsed, resolve
from redline.config.presets import PRESETS
from redline.config.problems import InvalidConfigError, Problem, suggestion
from redline.config.tree import SECTIONS, RunConfig, options_by_field, spellings, value_of


def load_toml(path: str | Path, *, training: bool = True) -> Parsed:
    """The configuration that a TOML file describes.

    Raises: InvalidConfigError when the file cannot be read or is no TOML, and with every unknown key, bad
        value, refused option and broken rule.
    """
    return resolve(read_layer(path), Layer(), training=training)


def read_layer(path: str | Path) -> Layer:
    """The values that a TOML file states."""
    layer = Layer()
    for where, key, value in _entries(_read(Path(path)), layer):
        _put(where, key, value, layer)
    return layer


def _read(path: Path) -> dict[str, Any]:
    import tomllib  # needed only when there is a file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        what, why = f"cannot read the config file {path}.", f"{exc.strerror or exc}."
        raise InvalidConfigError([Problem("config-file", what, why, "correct the path.")]) from exc
    except ValueError as exc:  # no UTF-8, or no TOML
        what, why = f"{path} is not a TOML file.", f"{exc}."
        raise InvalidConfigError([Problem("config-file", what, why, "correct that line.")]) from exc


def _entries(document: Mapping[str, Any], layer: Layer) -> Iterator[tuple[str, str, Any]]:
    """(section or "", key, value) of each entry; tables that are no section become problems."""
    for name, entry in document.items():
        if not isinstance(entry, dict):
            yield "", name, entry
        elif name in SECTIONS:
            yield from ((name, key, value) for key, value in entry.items())
        else:
            mend = suggestion(name, SECTIONS, f"the sections are {', '.join(SECTIONS)}.")
            layer.problems.append(
                Problem("unknown-key", f"there is no section [{name}].", "every key must be obeyed.", mend)
            )


def _put(where: str, key: str, value: Any, layer: Layer) -> None:
    shown = f"{where}.{key}" if where else key
    spelling = spellings().get(to_flag(key))
    if spelling is None:
        mend = suggestion(
            key, (name[2:].replace("-", "_") for name in spellings()), "docs/options.md lists every key."
        )
        layer.problems.append(
            Problem("unknown-key", f"there is no key {shown}.", "every key must be obeyed.", mend)
        )
        return
    option = spelling.option
    if where not in ("", option.section):
        what, why = f"{key} stands in [{where}].", f"it belongs to [{option.section}]."
        layer.problems.append(
            Problem("wrong-section", what, why, f"move it to [{option.section}].", (option.flag,))
        )
        return
    if spelling.constant is not UNSET:
        value = _switched(spelling, value)
    if value is UNSET:
        what, why = f"{shown} must be true.", f"it stands for {option.show(spelling.constant)}."
        layer.problems.append(
            Problem("bad-value", what, why, f"state {option.field} instead.", (option.flag,))
        )
        return
    value = plain(option, value)
    if fault := option.fault(value):
        layer.problems.append(_bad_value(option, shown, value, fault))
        return
    layer.put(key, spelling, value)


def _bad_value(option: Option, shown: str, value: Any, fault: str) -> Problem:
    """As `Option.bad_value`, in the file's own words: quotes may be all that is wrong."""
    problem = option.bad_value(value, fault)
    mend = problem.mend
    if option.kind is not bool:
        mend = f"for example {option.field} = {_literal(option.another_value())}."
    return replace(problem, what=f"{shown} = {_literal(value)}: the value {fault}.", mend=mend)


def _switched(spelling: Spelling, value: Any) -> Any:
    """The option's value when a switch's key is `value`; UNSET when it cannot be told."""
    if value is True:
        return spelling.constant
    if spelling.option.kind is not bool:
        return UNSET
    return not spelling.constant if value is False else value


def plain(option: Option, value: Any) -> Any:
    """A TOML (or JSON) value as the option's own type, where that is only a matter of form.

    Lists become tuples, whole numbers become floats, "none" becomes None, one value becomes a list of one,
    and numbers in a list of words (weights of a blend) words.
    """
    if value is None or (option.optional and value == "none"):
        return None
    if option.count in (0, 1):
        return _plain_item(option, value)
    items = value if isinstance(value, list | tuple) else [value]
    if option.kind is str:
        items = [repr(item) if type(item) in (int, float) else item for item in items]
    return tuple(_plain_item(option, item) for item in items)


def _plain_item(option: Option, value: Any) -> Any:
    return float(value) if option.kind is float and type(value) is int else value


def to_toml(config: RunConfig) -> str:
    """`config` as a TOML file that gives the very same configuration when it is loaded.

    It states every active option, whatever the defaults and presets of a later release are, and others where
    they differ from what the reader would assume.
    """
    preset = config.model.preset
    assumed = PRESETS.get(preset, {}) if preset else {}
    lines: list[str] = []
    for section in SECTIONS:
        stated = [
            f"{option.field} = {_literal(value)}"
            for option in options_by_field().values()
            if option.section == section
            for value in [value_of(config, option.field)]
            if _is_stated(option, value, assumed.get(option.field, option.default))
        ]
        if stated:
            lines += [f"[{section}]", *stated, ""]
    return "\n".join(lines)


def _is_stated(option: Option, value: Any, assumed: Any) -> bool:
    return value != assumed or (option.state == "active" and value is not None)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if value is None:
        return '"none"'
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Every option by section and field, in types that JSON has; the counterpart of `from_dict`."""
    return {
        name: {
            option.field: value_of(config, option.field)
            for option in options_by_field().values()
            if option.section == name
        }
        for name in SECTIONS
    }


def from_dict(values: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The configuration that `to_dict` described, also after a way through JSON.

    Names that this release does not know are left out, and options that `values` does not name take their
    defaults: it reads what another release wrote. Rules are not checked.
    """
    table = options_by_field()
    sections = {}
    for name, section in SECTIONS.items():
        entries = values.get(name, {})
        sections[name] = section(
            **{
                key: plain(table[key], value)
                for key, value in entries.items()
                if key in table and table[key].section == name
            }
        )
    return RunConfig(**sections)  # type: ignore[arg-type]
