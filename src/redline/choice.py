"""What ran in place of what was asked for, and why: the record behind every `auto`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a run.

    Attributes:
        what: the seam, for example "attention-backend".
        asked: the value the user gave (or the default), for example "auto".
        ran: the value that runs, for example "flash".
        why: one sentence.
    """

    what: str
    asked: str
    ran: str
    why: str

    @property
    def is_fallback(self) -> bool:
        """True when something else runs than was asked for by name."""
        return self.asked not in ("auto", self.ran)

    def __str__(self) -> str:
        return f"{self.what}: {self.ran} (asked: {self.asked}) - {self.why}"
