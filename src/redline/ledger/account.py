"""The account of a profiled step: how long it took, what of that was useful, and where the rest went.

    wall time = ideal time (model FLOPs / peak) + the losses, exactly

so 100% of peak less every loss's points of MFU is the MFU of the profiled steps. Frozen, plain values; the
same, key by key, as `ledger.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from redline.errors import DataError, TrainingError
from redline.files import os_errors_as, write_json_atomic
from redline.ledger.metrics import finite

VERSION = 1
LEDGER_FILE = "ledger.json"
_PLAIN: dict[str, tuple[type, ...]] = {
    "float": (int, float), "float | None": (int, float, type(None)), "int": (int,), "str": (str,),
    "int | None": (int, type(None)), "Account": (str,),
}  # fmt: skip
Row = TypeVar("Row")
Account = Literal["kernels", "communication", "memory", "host", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a step is measured against; None where it is not known.

    Attributes:
        device: name of the device.
        kind: "cuda" or "cpu".
        dtype: whose peak is the denominator.
        peak_flops_per_s, peak_source: dense, of one device.
        bandwidth_bytes_per_s: of its memory.
        model_flops: of one step on one rank, recomputed work left out.
        attention_flops: the part of them that is attention's two products.
        flops_source: where they come from: "model" or "shapes" (of the operators in the trace).
        convention: "causal-half" or "full".
        step_ms: median step of the run, profiled ones left out.
        update_bytes, norm_bytes: of one step on one rank, by Redline's kernels of AdamW and of the gradients'
            norm, which no operator is around whose shapes would say.
    """

    device: str = ""
    kind: str = "cpu"
    dtype: str = ""
    peak_flops_per_s: float | None = None
    peak_source: str = ""
    bandwidth_bytes_per_s: float | None = None
    model_flops: float | None = None
    attention_flops: float | None = None
    flops_source: str = ""
    convention: str = "causal-half"
    step_ms: float | None = None
    update_bytes: float | None = None
    norm_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One bar of the waterfall: time of a step that was not spent on model FLOPs at peak.

    Attributes:
        key: stable name, see causes.py.
        account: whose loss it is.
        cause: in words.
        ms: of a step; may be negative where kernels ran above a measured peak.
        points: of MFU, in percent of peak; None without a known ideal time.
        share: of the step's wall time.
        mends: ids of the doctor's checks that may regain it.
    """

    key: str
    account: Account
    cause: str
    ms: float
    share: float
    points: float | None
    mends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator in one phase and role, summed over a step.

    Attributes:
        name: of the operator, or of the kernel where no operator is known.
        kind: see kinds.py.
        phase: forward, backward, recompute, optimizer, or "".
        role: fprop, dgrad or wgrad of a GEMM, else "".
        calls: in a step.
        ms: of the step that its kernels own.
        flops, bytes: of a step, from the shapes of its inputs; None where they say nothing. Bytes count every
            input once and an output, which is a floor.
        flops_per_s, bytes_per_s: reached.
        of_peak, of_bandwidth: the same over the device's limits.
        limit: "compute" or "memory", whichever limit it is nearer to by its FLOPs and bytes; "" if unknown.
    """

    name: str
    kind: str
    phase: str
    role: str
    calls: float
    ms: float
    flops: float | None = None
    bytes: float | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    of_peak: float | None = None
    of_bandwidth: float | None = None
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module of a block (or outside them: layer None), in one phase; summed over a step."""

    phase: str
    layer: int | None
    module: str
    calls: float
    ms: float
    flops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """One rank's waterfall, means over its profiled steps; `source` is the trace it was read from."""

    rank: int
    wall_ms: float
    ideal_ms: float | None
    mfu: float | None
    losses: tuple[Loss, ...]
    source: str = ""

    def loss_ms(self, key: str) -> float:
        """Milliseconds of one cause, 0 where it has no bar."""
        return next((each.ms for each in self.losses if each.key == key), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one cause differs between ranks.

    Attributes:
        skew: worst over mean less one, 0 for a mean of 0.
    """

    key: str
    mean_ms: float
    worst_ms: float
    worst_rank: int
    skew: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """The account of a job: the mean over its ranks, and how they differ. What `ledger.json` holds.

    Attributes:
        reference: what it is measured against.
        steps: numbers of the profiled steps, empty where a trace does not mark them.
        wall_ms, ideal_ms, mfu, losses, operators, modules: means over the ranks; ms and calls are per step.
        ranks: each rank's own waterfall.
        spread: of the wall time ("wall"), and of each cause.
        overhead: how much longer the profiled steps took than the median of the others, what is done after
            a step left out; None if not known.
    """

    reference: Reference
    steps: tuple[int, ...]
    wall_ms: float
    ideal_ms: float | None
    mfu: float | None
    losses: tuple[Loss, ...]
    operators: tuple[OperatorRow, ...]
    modules: tuple[ModuleRow, ...]
    ranks: tuple[RankAccount, ...] = ()
    spread: tuple[Spread, ...] = ()
    overhead: float | None = None

    def loss_ms(self, key: str) -> float:
        """Milliseconds of one cause, 0 where it has no bar."""
        return next((each.ms for each in self.losses if each.key == key), 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The document, NaN and Inf as None."""
        found: dict[str, Any] = finite({"version": VERSION, **asdict(self)})
        return found


def write_account(path: Path, account: StepAccount) -> None:
    """Write ledger.json atomically.

    Raises: TrainingError when it cannot be written.
    """
    with os_errors_as(TrainingError, path, "write"):
        write_json_atomic(path, account.as_dict())


def read_account(path: Path) -> StepAccount:
    """The account as it was written.

    Raises: DataError when the file is missing or is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise ValueError(f"its version is {document['version']}, not {VERSION}")
        return _account(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        what = f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)
        raise DataError(
            f"{path} is no account of the ledger: {what}.",
            why="a run writes it after its profiled steps, and `redline ledger` from a trace.",
            mend="name a run's folder that holds a trace, or make one with --profile-ledger.",
        ) from exc


def _account(document: dict[str, Any]) -> StepAccount:
    _check(StepAccount, document)
    return StepAccount(
        reference=_made(Reference, document["reference"]),
        steps=tuple(document["steps"]),
        wall_ms=document["wall_ms"],
        ideal_ms=document["ideal_ms"],
        mfu=document["mfu"],
        losses=_losses(document),
        operators=tuple(_made(OperatorRow, each) for each in document["operators"]),
        modules=tuple(_made(ModuleRow, each) for each in document["modules"]),
        ranks=tuple(_made(RankAccount, {**each, "losses": _losses(each)}) for each in document["ranks"]),
        spread=tuple(_made(Spread, each) for each in document["spread"]),
        overhead=document["overhead"],
    )


def _losses(values: Mapping[str, Any]) -> tuple[Loss, ...]:
    return tuple(_made(Loss, {**each, "mends": tuple(each["mends"])}) for each in values["losses"])


def _made(kind: Callable[..., Row], values: Mapping[str, Any]) -> Row:
    _check(kind, values)
    return kind(**values)


def _check(kind: Any, values: Mapping[str, Any]) -> None:
    """Raises ValueError where a number or a text of the document is something else."""
    for each in fields(kind):
        expected = _PLAIN.get(str(each.type))
        if expected and each.name in values and not isinstance(values[each.name], expected):
            raise ValueError(f"its {each.name} is {values[each.name]!r}")
