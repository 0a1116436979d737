"""`redline train [CONFIG.toml] [--flags]`."""

from __future__ import annotations

from collections.abc import Sequence

from redline.config import format_help, parse_args, to_toml


def main(argv: Sequence[str]) -> int:
    """Train, or print the help or the resolved configuration."""
    words = list(argv)
    if "-h" in words or "--help" in words or "--help-all" in words:
        print(format_help(short="--help-all" not in words))
        return 0
    prints = "--print-config" in words
    parsed = parse_args([word for word in words if word != "--print-config"])
    if prints:
        print(to_toml(parsed.config), end="")
        return 0

    from redline.cli.console import ReportConsole
    from redline.report import print_summary
    from redline.run import run

    print_summary(run(parsed), ReportConsole())
    return 0
