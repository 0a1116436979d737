"""docs/doctor.md holds the printed list of checks, and its commands are those of the command line."""

import re
from pathlib import Path

from redline.cli.doctor import _parser
from redline.doctor.docs import checks_table, printed

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_page_is_printed() -> None:
    """Renew it with `python -m redline.doctor.docs docs/doctor.md`."""
    text = PAGE.read_text(encoding="utf-8")
    assert printed(text) == text
    assert checks_table().count("\n| RL") >= 37


def test_options_on_the_page_exist() -> None:
    known = {flag for action in _parser()._actions for flag in action.option_strings}
    commands = re.findall(r"^    redline doctor (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) >= 8
    used = {
        word.partition("=")[0] for command in commands for word in command.split() if word.startswith("--")
    }
    assert used <= known
