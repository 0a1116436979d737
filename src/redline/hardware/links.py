"""Measured links between devices of a node: a line through the times of each collective, by what is sent.

`redline bench comm` measures them and keeps them, by card, in a file of the cache folder; a card that nobody
measured here has those of LINKS, where it is listed, else its data sheet's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from redline.files import write_json_atomic
from redline.hardware.datasheet import find_sheet

FORMAT = 1
FILE = "links.json"


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one collective = alpha_s + bytes that a rank sends / bytes_per_s."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The lines of one card.

    Attributes:
        card: its data sheet's name.
        ranks: devices of a node that were measured together.
        lines: by collective, as formulas/traffic.py names them.
        source: who measured when.
    """

    card: str
    ranks: int
    lines: Mapping[str, Line]
    source: str


H200_PAIR = MeasuredLinks(
    card="H200 SXM",
    ranks=2,
    lines=MappingProxyType({
        "all_reduce": Line(71.2e-6, 330e9),
        "all_gather": Line(58.8e-6, 291e9),
        "reduce_scatter": Line(63.9e-6, 262e9),
        "send": Line(65.5e-6, 369e9),
    }),
    source="two H200s of one host over NVLink, NCCL without multicast, torch 2.11, 64 KiB to 1 GiB, "
    "2026-11-29 (benchmarks/results/two-gpus-h200.json)",
)  # fmt: skip
LINKS = (H200_PAIR,)


def links_of(name: str, measured: Mapping[str, MeasuredLinks]) -> MeasuredLinks | None:
    """What is known of a device's links: measured here, else listed; None where neither."""
    card = card_of(name)
    return measured.get(card) or next((each for each in LINKS if each.card == card), None)


def card_of(name: str) -> str:
    """The name under which a device's links are kept: its data sheet's where it has one."""
    sheet = find_sheet(name)
    return name if sheet is None else sheet.name


def read_links(path: Path) -> dict[str, MeasuredLinks]:
    """What was measured here, by card; nothing where there is no file, or none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            return {}
        return {card: _links(card, values) for card, values in document["links"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a cache: it is measured again, or the data sheet serves


def write_links(path: Path, links: MeasuredLinks) -> None:
    """Keep `links` beside those of other cards.

    Raises: OSError when it cannot be written.
    """
    kept = {**read_links(path), links.card: links}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"format": FORMAT, "links": {card: _values(each) for card, each in kept.items()}})


def _values(links: MeasuredLinks) -> dict[str, Any]:
    lines = {kind: [line.alpha_s, line.bytes_per_s] for kind, line in links.lines.items()}
    return {"ranks": links.ranks, "lines": lines, "source": links.source}


def _links(card: str, values: Mapping[str, Any]) -> MeasuredLinks:
    lines = {kind: Line(float(alpha), float(rate)) for kind, (alpha, rate) in values["lines"].items()}
    if any(line.alpha_s < 0 or not line.bytes_per_s > 0 for line in lines.values()):
        raise ValueError("a start or a rate is negative")
    ranks, source = int(values["ranks"]), str(values["source"])
    return MeasuredLinks(card=card, ranks=ranks, lines=MappingProxyType(lines), source=source)
