"""The list of checks as markdown, for docs/doctor.md: `python -m redline.doctor.docs docs/doctor.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from redline.doctor.checks import CHECKS
from redline.doctor.messages import texts_of
from redline.files import write_text_atomic

BEGIN, END = "<!-- checks: printed by redline.doctor.docs -->", "<!-- end of checks -->"
ACCOUNTS = ("kernels", "communication", "memory", "host")


def checks_table() -> str:
    """One table an account: id, severity, what it finds, what it looks at, why it costs."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for account in ACCOUNTS:
        yield f"### {account}\n"
        yield "| id | severity | finds | looks at | why it costs |"
        yield "| --- | --- | --- | --- | --- |"
        for each in CHECKS:
            if each.account == account:
                texts = texts_of(each.id, "", "en")
                why = "" if "{" in texts["why"] else texts["why"]
                cells = (each.id, each.severity, texts["title"], texts["looks"], why)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def printed(page: str) -> str:
    """A page with the table between its marks renewed."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{checks_table()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_text_atomic(target, printed(target.read_text(encoding="utf-8")))
