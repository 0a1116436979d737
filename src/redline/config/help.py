"""The help text: flags grouped by section, fitted to the terminal."""

from __future__ import annotations

import os
import textwrap

from redline.config.flags import Option, show_value
from redline.config.tree import SECTIONS, options

COLUMN = 32  # where the meaning begins
USAGE = "usage: redline train [CONFIG.toml] [--flag value ...]"
INTRO = """
Train a GPT, Llama or Qwen model. With no arguments: a small one, on the source text of Python's own library.
Flags override the file, the file overrides --preset. A TOML key is a flag's name with underscores.
A switch shown as --[no-]x has --no-x; "none" unsets what can be unset.
"""
# Flags of the command itself, which are no part of a configuration.
INSTEAD = {
    "--print-config": "Print the whole resolved configuration as TOML, which can be used again.",
    "--help": "Show the flags used most.",
    "--help-all": "Show every flag; docs/options.md says more.",
}
EXAMPLES = """\
examples:
  redline train
  redline train --data-path data/mine_text_document \\
      --num-layers 8 --hidden-size 512 --swiglu \\
      --num-attention-heads 8 --train-iters 2000 \\
      --save runs/mine --save-interval 500
  redline train runs/mine/config.toml \\
      --load runs/mine --save runs/mine"""


def format_help(short: bool = True, width: int | None = None) -> str:
    """The help of the options.

    Args:
        short: only the options used most; else all of them, with what is not available yet marked.
        width: columns to fit into; None asks the terminal.
    """
    width = max(width or _terminal_width(), COLUMN + 24)
    blocks = [USAGE, textwrap.fill(" ".join(INTRO.split()), width)]
    for name, section in SECTIONS.items():
        shown = [
            option for option in options() if option.section == name and (option.spec.short or not short)
        ]
        if shown:
            blocks.append("\n".join([f"{section.title}:", *(_entry(option, width) for option in shown)]))
    instead = (_line(f"  {flag}", meaning, width) for flag, meaning in INSTEAD.items())
    blocks.append("\n".join(["Instead of training:", *instead]))
    return "\n\n".join([*blocks, EXAMPLES]) + "\n"


def _terminal_width() -> int:
    """Columns of the terminal, 80 where there is none."""
    try:
        return os.get_terminal_size().columns or 80
    except OSError:
        return 80


def _entry(option: Option, width: int) -> str:
    also = ", ".join((*option.spec.aliases, *option.spec.shorthands))
    meaning = f"{option.spec.help}{f' Also {also}.' if also else ''}{remark(option)}"
    return _line(f"  {_head(option)}", meaning, width)


def _line(head: str, meaning: str, width: int) -> str:
    """A flag and what it means, in two columns, or one below the other where the flag is too long."""
    indent = " " * COLUMN
    body = textwrap.fill(
        meaning, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if len(head) < COLUMN - 1:
        return head.ljust(COLUMN) + body[COLUMN:]
    return f"{textwrap.fill(head, width, subsequent_indent='      ', break_on_hyphens=False)}\n{body}"


def _head(option: Option) -> str:
    return f"{option.shown_flag} {option.metavar}".rstrip()


def remark(option: Option) -> str:
    """The default and the state of an option, in brackets."""
    remarks = []
    if option.state == "built-in":
        remarks.append("built in")
    elif option.kind is bool:
        remarks += ["on by default"] if option.default else []
        remarks += [f"default: {option.spec.unset}"] if option.spec.unset else []
    elif option.default not in (None, ()):
        remarks.append(f"default {show_value(option.default)}")
    if option.spec.waits_for:
        remarks.append("not part of Redline" if option.spec.waits_for.never else "not available yet")
    return f" [{'; '.join(remarks)}]" if remarks else ""
