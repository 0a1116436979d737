"""Rules that join several options, each with a name that errors and docs/options.md cite.

Two kinds follow from the fields themselves: options that exclude each other (`excludes`), and options that
have no effect without another (`needs`). The others are functions, one a rule.
"""

from redline.config.rules.check import RULES, refusals, satisfies, show_need, violations
from redline.config.rules.rule import Rule

__all__ = ["RULES", "Rule", "refusals", "satisfies", "show_need", "violations"]
