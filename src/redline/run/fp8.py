"""What a run says of its casts to fp8: sudden saturation, and the tables of --fp8-stats-interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redline.choice import Choice
from redline.ledger import Ledger
from redline.model import Fp8Gemms
from redline.plan.fp8 import Fp8Plan
from redline.precision import NEVER, Fp8Row

JUMP = 4.0  # times the limit: a value cut to a quarter is no rounding, and no slow growth
WORST = 8  # rows of the summary


class Fp8Watch:
    """Reads the fp8 state of a run after its steps, on the rank that records.

    Attributes:
        rows: the newest table.
        saturates: whether a value may exceed its scale: not where each tensor, or block, is measured.
        returns: whether GEMMs may return to bf16, or have.
    """

    def __init__(self, fp8: Fp8Gemms) -> None:
        self.rows: list[Fp8Row] = []
        self._fp8, self._state = fp8, fp8.state
        self.saturates = fp8.state.spec.recipe == "delayed"
        self.returns = fp8.state.spec.patience != NEVER or self.returned > 0

    @property
    def returned(self) -> int:
        """How many GEMMs have returned to bf16."""
        return len(self._fp8.returned)

    def overshoot(self) -> tuple[float, str | None]:
        """How far the largest value since the last call exceeded what its scale can hold, and a warning."""
        factor, site, operand = self._state.worst_overshoot()
        if factor < JUMP:
            return factor, None
        return factor, (
            f"fp8 cut off values of {site}, operand {operand}, up to {factor:.3g} times what its scale "
            "holds; the scale follows, and --fp8-stats-interval shows how many."
        )

    def record(self, step: int, ledger: Ledger) -> None:
        """Write the table of the step that has ended."""
        self.rows = self._fp8.table()
        ledger.record_fp8(step, [row.as_dict() for row in self.rows])

    def worst(self) -> list[dict[str, Any]]:
        """The rows of the newest table that lost most, for summary.json."""
        return [row.as_dict() for row in sorted(self.rows, key=lambda row: -row.lost)[:WORST]]


def choices_now(
    choices: tuple[Choice, ...], plan: Fp8Plan | None, returned: Mapping[str, int]
) -> tuple[Choice, ...]:
    """A run's choices with those of fp8 as they are after the returns to bf16."""
    if plan is None:
        return choices
    at = choices.index(plan.choices[0])
    return *choices[:at], *plan.choices_after(returned), *choices[at + len(plan.choices) :]
