"""The one form of a check, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from redline.doctor.case import Case
from redline.doctor.finding import Account, Hit, Severity
from redline.errors import RedlineError

Needs = Literal["launch", "cost", "environment", "machine", "run"]
Found = Hit | Iterable[Hit] | None


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: stable, "RL001" and on.
        account: where its time is lost.
        severity: unless a hit says otherwise.
        needs: what a case must have for it: a configuration, a prediction, an environment, a machine, a run.
        fields: options it looks at; it is quiet where Megatron-LM needs one that the launch does not state.
        run: hits in a case.
    """

    id: str
    account: Account
    severity: Severity
    needs: Needs
    fields: tuple[str, ...]
    run: Callable[[Case], Found]

    def hits(self, case: Case) -> list[Hit]:
        """What it finds; nothing where the case lacks what it needs."""
        if not case.has(self.needs) or any(map(case.missing, self.fields)):
            return []
        try:
            found = self.run(case)
            return [] if found is None else [found] if isinstance(found, Hit) else list(found)
        except RedlineError:  # numbers that make no model or layout: the rules speak of them
            return []


def check(
    id: str, account: Account, severity: Severity = "warning", *fields: str, needs: Needs = "launch"
) -> Callable[[Callable[[Case], Found]], Check]:
    """Make the function below a Check."""
    return lambda run: Check(id, account, severity, needs, fields, run)
