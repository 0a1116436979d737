"""The ledger's account in the terminal: the waterfall in eight lines, and its tables in full.

Printed from plain values (ledger.json, or what summary.json holds of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.report.tables import new_table
from redline.units import format_count, format_flops_per_s

LINES = 8
OPERATORS = 20
SHARES = {"of_peak": "peak", "of_bandwidth": "memory"}  # columns that only a known device fills
SLOWED = 0.05  # profiled steps this much longer than ordinary ones are said not to be like them
RAN_AT = {"gemm": "matrix products", "attention": "attention"}  # with no peak to be below


def waterfall_view(account: Mapping[str, Any]) -> Table:
    """Eight lines: peak, the six largest losses or five and the rest, and what is left; then two remarks."""
    table = new_table(waterfall_title(account))
    table.show_header = False
    table.caption, table.caption_justify = Text("; ".join(_remarks(account)), style="dim"), "left"
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for row in waterfall_rows(account):
        table.add_row(*row)
    return table


def waterfall_title(account: Mapping[str, Any]) -> str:
    """What was accounted for, and how long it took."""
    steps = account["steps"]
    named = f"step{'s' * (len(steps) > 1)} {_ends(steps)}" if steps else "the trace"
    slower = account.get("overhead")
    watched = "" if slower is None else f", {slower:+.1%} under the profiler"
    return f"where the time of {named} went ({account['wall_ms']:.4g} ms each{watched})"


def waterfall_rows(account: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """(points, cause, account, time, checks) of each line; points of MFU, of the time without a peak."""
    losses = sorted(account["losses"], key=lambda loss: -abs(loss["ms"]))
    losses = [loss for loss in losses if loss["ms"]]
    most = LINES - 2
    shown, rest = (losses, []) if len(losses) <= most else (losses[: most - 1], losses[most - 1 :])
    reference, known = account["reference"], account["ideal_ms"] is not None
    rows = [_peak_row(reference) if known else ("100.0%", "the step", "", _ms(account["wall_ms"]), "")]
    for loss in shown:
        words = loss["cause"] if known else RAN_AT.get(loss["key"], loss["cause"])
        own = "" if loss["account"] == loss["key"] else loss["account"]
        rows.append((_points(loss["share"]), words, own, _ms(loss["ms"]), " ".join(loss["mends"][:2])))
    if rest:
        share, ms = sum(loss["share"] for loss in rest), sum(loss["ms"] for loss in rest)
        rows.append((_points(share), f"{len(rest)} smaller causes", "", _ms(ms), ""))
    if known:
        rows.append((f"{account['mfu']:.1%}", "MFU", "", _ms(account["ideal_ms"]), ""))
    return rows


def _peak_row(reference: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    peak = format_flops_per_s(reference["peak_flops_per_s"])
    return "100.0%", f"peak: {peak} {reference['dtype']}".strip(), "", "", ""


def _points(share: float) -> str:
    return f"{-100 * share:+.1f}" if round(100 * share, 1) else "0.0"


def _ms(ms: float) -> str:
    return f"{ms:,.3g} ms" if abs(ms) < 100 else f"{ms:,.0f} ms"


def _ends(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def _remarks(account: Mapping[str, Any]) -> Iterator[str]:
    """In what the ranks differ most; what an ordinary step reaches, where it is faster."""
    apart = [each for each in account.get("spread") or () if each["key"] != "wall"]
    worst = max(apart, key=lambda each: each["worst_ms"] - each["mean_ms"], default=None)
    if worst is not None and (more := worst["worst_ms"] - worst["mean_ms"]) > 0:
        causes = {loss["key"]: loss["cause"] for loss in account["losses"]}
        named = causes.get(worst["key"], worst["key"])
        yield f"rank {worst['worst_rank']} has {_ms(more)} more of {named} than the mean"
    step_ms, ideal_ms = account["reference"].get("step_ms"), account["ideal_ms"]
    if step_ms and ideal_ms is not None and (account.get("overhead") or 0.0) >= SLOWED:
        yield f"an ordinary step, of {_ms(step_ms)}, has an MFU of {ideal_ms / step_ms:.1%}"


def print_account(
    account: Mapping[str, Any], console: Console | None = None, *, operators: int = OPERATORS
) -> None:
    """Print an account whole: every bar, the ranks, the longest operators, the layers."""
    (console or Console()).print(account_view(account, operators=operators))


def account_view(account: Mapping[str, Any], *, operators: int = OPERATORS) -> RenderableType:
    """The account as tables."""
    parts: list[RenderableType] = [_whole_waterfall(account)]
    if len(account["ranks"]) > 1:
        parts.append(_ranks(account))
    if operators and account["operators"]:
        parts.append(_operators(account["operators"], operators))
    if len(account["modules"]) > 1:
        parts.append(_modules(account["modules"]))
    return Group(*parts)


def _whole_waterfall(account: Mapping[str, Any]) -> Table:
    table = new_table(waterfall_title(account))
    known = account["ideal_ms"] is not None
    table.add_column("of peak" if known else "of the time", justify="right", no_wrap=True)
    table.add_column("cause", overflow="fold")
    table.add_column("account", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("checks", overflow="fold")
    if known:
        table.add_row(*_peak_row(account["reference"]))
    for loss in account["losses"]:
        words = loss["cause"] if known else RAN_AT.get(loss["key"], loss["cause"])
        checks = " ".join(loss["mends"])
        table.add_row(_points(loss["share"]), words, loss["account"], f"{loss['ms']:,.3f}", checks)
    table.add_section()
    if known:
        source = account["reference"]["flops_source"]
        said = " (FLOPs by the operators' shapes)" if source == "shapes" else ""
        table.add_row(f"{account['mfu']:.1%}", f"MFU{said}", "", f"{account['ideal_ms']:,.3f}", "")
    return table


def _ranks(account: Mapping[str, Any]) -> Table:
    table = new_table(f"{len(account['ranks'])} ranks")
    table.add_column("cause")
    for header in ("mean ms", "worst ms", "rank", "skew"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in account["spread"]:
        table.add_row(
            each["key"],
            f"{each['mean_ms']:,.3f}",
            f"{each['worst_ms']:,.3f}",
            str(each["worst_rank"]),
            f"{each['skew']:+.0%}",
        )
    return table


def _operators(rows: Sequence[Mapping[str, Any]], most: int) -> Table:
    title = f"operators, the {min(most, len(rows))} longest; shares of peak FLOP/s and of memory bandwidth"
    table = new_table(title)
    table.add_column("operator", overflow="fold", min_width=16)
    for header in ("phase", "role"):
        table.add_column(header, no_wrap=True)
    known = [key for key in ("of_peak", "of_bandwidth") if any(row[key] is not None for row in rows[:most])]
    for header in ("calls", "ms", "FLOP/s", *(SHARES[key] for key in known)):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows[:most]:
        table.add_row(
            Text(row["name"]),
            row["phase"],
            row["role"],
            f"{row['calls']:.4g}",
            f"{row['ms']:,.3f}",
            "" if row["flops_per_s"] is None else _flops_per_s(row["flops_per_s"]),
            *(_share(row[key]) for key in known),
        )
    return table


def _flops_per_s(rate: float) -> str:
    """12.6 G: the heading says of what."""
    return format_flops_per_s(rate).removesuffix("FLOP/s").rstrip()


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _modules(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By module over all layers: forward, recompute and backward beside each other."""
    table = new_table("modules, all layers together")
    table.add_column("module")
    phases = [phase for phase in ("forward", "recompute", "backward", "optimizer", "") if _any(rows, phase)]
    for phase in phases:
        table.add_column(f"{phase or 'else'} ms", justify="right", no_wrap=True)
    table.add_column("FLOPs", justify="right", no_wrap=True)
    for module, found in _by_module(rows):
        sums = {phase: sum(row["ms"] for row in found if row["phase"] == phase) for phase in phases}
        flops = sum(row["flops"] or 0.0 for row in found)
        cells = [f"{ms:,.3f}" if ms else "" for ms in sums.values()]
        table.add_row(module or "(none)", *cells, format_count(flops) if flops else "")
    return table


def _any(rows: Sequence[Mapping[str, Any]], phase: str) -> bool:
    return any(row["phase"] == phase for row in rows)


def _by_module(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["module"], []).append(row)
    yield from sorted(found.items(), key=lambda item: -sum(row["ms"] for row in item[1]))
