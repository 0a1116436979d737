"""docs/options.md, printed from the tree: `python -m redline.config.docs docs/options.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from redline.config.flags import UNSET, Option, show_value
from redline.config.presets import PRESETS
from redline.config.rules import RULES, show_need
from redline.config.tree import SECTIONS, options
from redline.files import write_text_atomic

INTRO = """\
# Options

Printed from the option tree by `python -m redline.config.docs docs/options.md`; do not edit.

Every option is a flag of `redline train` and a key of its TOML file: the flag's name with underscores, under
the section's table or at the top. Flags override the file, the file overrides `--preset`. A switch `--x` has
`--no-x`, shown where it is not off already, and `--disable-x` where it is not off by default. The word `none`
unsets what can be unset. Of an option given twice the last value counts, of a list too; the run says so.

No option is ignored. *active*: it acts. *built in*: Redline always does it; asking for it is accepted and
said once, asking against it is refused. *not yet* and *never*: any value but the default is refused, with
the reason. An option that would have no effect without another is refused too; the column "needs" names the
other.

With none of `--num-layers`, `--hidden-size`, `--num-attention-heads` and `--preset`, the preset is `demo`.
"""


def options_page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([INTRO, *_sections(), *_differences(), *_presets(), *_rules()])


def _sections() -> Iterator[str]:
    for name, section in SECTIONS.items():
        account = f" Account: {section.account}." if section.account else ""
        yield f"## {section.title}\n\nTOML table `[{name}]`.{account}\n"
        yield "| flag | default | meaning | needs | state |\n| --- | --- | --- | --- | --- |"
        yield from (_row(option) for option in options() if option.section == name)
        yield ""


def _row(option: Option) -> str:
    spec = option.spec
    flags = [f"`{option.shown_flag} {_cell(option.metavar)}`".replace(" `", "`")]
    flags += [f"`{alias}`" for alias in spec.aliases]
    flags += [f"`{name}` = {show_value(value)}" for name, value in spec.shorthands.items()]
    needs = ", ".join(f"`{show_need(name, wanted)}`" for name, wanted in spec.needs.items())
    default = "on" if option.default is True else "off" if option.default is False else _default(option)
    return f"| {'<br>'.join(flags)} | {default} | {_cell(spec.help)} | {needs} | {_state(option)} |"


def _default(option: Option) -> str:
    return option.spec.unset if option.default in (None, ()) else f"`{show_value(option.default)}`"


def _state(option: Option) -> str:
    spec = option.spec
    if spec.built_in:
        return f"built in: {spec.built_in}"
    if spec.waits_for:
        return f"{'never' if spec.waits_for.never else 'not yet'}: {spec.waits_for.why}"
    refused = ", ".join(f"`{value}`" for value in spec.refused)
    return f"active, except {refused}" if refused else "active"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _differences() -> Iterator[str]:
    yield "## Defaults that differ from Megatron-LM's\n\n| flag | here | Megatron-LM |\n| --- | --- | --- |"
    for option in options():
        if option.spec.megatron is not UNSET:
            here = "built in" if option.spec.built_in else show_value(option.default)
            yield f"| `{option.flag}` | {_word(here)} | {_word(show_value(option.spec.megatron))} |"
    own = ", ".join(f"`{option.flag}`" for option in options() if option.spec.own)
    yield f"\nFlags that Megatron-LM does not have: {own}.\n"


def _word(text: str) -> str:
    return {"True": "on", "False": "off", "none": "unset"}.get(text, text)


def _presets() -> Iterator[str]:
    yield "## Presets\n\n| `--preset` | layers | hidden | MLP | heads / groups | vocabulary | sequence |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, v in PRESETS.items():
        heads = v["num_attention_heads"]
        groups, ffn = v.get("num_query_groups", heads), v.get("ffn_hidden_size", 4 * v["hidden_size"])
        vocab = v.get("vocab_size", "the tokenizer's")
        shape = f"{v['num_layers']} | {v['hidden_size']} | {ffn} | {heads} / {groups}"
        yield f"| `{name}` | {shape} | {vocab} | {v['seq_length']} |"
    yield ""


def _rules() -> Iterator[str]:
    yield "## Rules\n\nBeside bounds, needs and exclusions, these join several options.\n"
    yield "| rule | options | reason |\n| --- | --- | --- |"
    for rule in RULES:
        yield f"| {rule.name} | {', '.join(f'`{flag}`' for flag in rule.flags)} | {rule.why} |"
    groups = dict.fromkeys(option.spec.excludes for option in options() if option.spec.excludes)
    for group in groups:
        flags = ", ".join(f"`{option.flag}`" for option in options() if option.spec.excludes == group)
        yield f"| one-of/{group} | {flags} | they exclude each other. |"
    yield ""


if __name__ == "__main__":
    write_text_atomic(Path(sys.argv[1]), options_page())
