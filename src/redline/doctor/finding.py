"""What a check reports: a hit with its mend, and the finding that is printed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from redline.ledger import Loss

Severity = Literal["error", "warning", "hint"]
Account = Literal["kernels", "communication", "memory", "host"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """The exact change, as data: the cost model reruns with it and a patch is made of it.

    Attributes:
        values: option field -> value.
        environment: variable -> value, None to unset it.
        drop: flags, as typed, to take out.
        rename: flag, as typed -> words to write in its place and its value's; `values` say what they mean.
        safe: the training result stays as it is, to rounding; others are advised and never patched in.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str | None] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    safe: bool = True

    @property
    def acts(self) -> bool:
        """Whether there is anything to change in a script."""
        return bool(self.values or self.environment or self.drop or self.rename)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One thing a check found.

    Attributes:
        at: option field, environment variable or flag that the evidence points to.
        words: values for the check's texts.
        mend: the change, where one can be stated.
        severity: where it differs from the check's own.
        text: suffix of an alternative set of texts ("RL007.oom").
        share: share of the step time that the mend saves, where the check itself knows it.
        basis: phrase that says where `share` is from; "" for a measurement of a run, or arithmetic.
        causes: keys of the ledger's causes that hold its time, where they are not all of the check's.
    """

    at: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    mend: Mend = field(default_factory=Mend)
    severity: Severity | None = None
    text: str = ""
    share: float | None = None
    basis: str = ""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gain:
    """Share of the step time that a mend saves, 0.08 for 8%; None where nobody can tell; `basis` says why."""

    step_time: float | None
    basis: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A hit in words.

    Attributes:
        id, account, severity, title: of the check.
        evidence: what was seen; file and line of the flag, where it stands in a file.
        why: why it costs.
        mend: what to change, with the exact flags.
        gain: predicted, with its basis.
        change: the mend as data.
        causes: as of the hit.
    """

    id: str
    account: Account
    severity: Severity
    title: str
    evidence: str
    file: str | None
    line: int | None
    why: str
    mend: str
    gain: Gain
    change: Mend
    causes: tuple[str, ...] = ()

    def may_regain(self, loss: Loss) -> bool:
        """Whether its mend may regain time of this loss."""
        return may_regain(self.id, self.causes, loss)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        inner = ("gain", "change", "causes")
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in inner}
        return plain | {"gain": asdict(self.gain)}


def may_regain(id: str, causes: Collection[str], loss: Loss) -> bool:
    """Whether a mend of check `id` may regain time of this loss; `causes` as of a hit."""
    return id in loss.mends and (not causes or loss.key in causes)
