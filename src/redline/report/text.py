"""A run in the terminal: the log line of a step, and the summary at the end.

Everything is printed from plain values (the records of the ledger, the document of summary.json), so that a
finished run prints the same from its folder. rich handles narrow terminals and NO_COLOR.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.ledger import StepRecord, ValidRecord, perplexity
from redline.report.ledger_text import waterfall_view
from redline.report.tables import new_table
from redline.units import GIB, format_bytes, format_count, format_duration, format_flops_per_s


def step_line(
    records: Sequence[StepRecord],
    total_steps: int,
    now: datetime.datetime | None = None,
    *,
    throughput: bool = False,
) -> str:
    """One line for the steps since the last line, in the order and words of Megatron's log.

    Loss and time are means over the steps, rates what they made in their time together; skipped steps have no
    part in the loss. The learning rate is the one the last step used. `throughput` adds TFLOP/s.
    """
    last, time_s = records[-1], sum(record.step_time_s for record in records)

    def rate(each: Callable[[StepRecord], float | None]) -> float:
        return sum((each(record) or 0.0) * record.step_time_s for record in records) / time_s

    moment = now or datetime.datetime.now()
    losses = [record.loss for record in records if not record.skipped and math.isfinite(record.loss)]
    fields = [
        f" [{moment:%Y-%m-%d %H:%M:%S.%f}] iteration {last.step:8d}/{total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {time_s / len(records) * 1e3:.1f}",
    ]
    if throughput and last.flops_per_s is not None:
        tflops = rate(lambda record: record.flops_per_s) / 1e12
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {tflops:.4g}")
    fields.append(f"tokens/s: {rate(lambda record: record.tokens_per_s):.0f}")
    if last.mfu is not None:
        fields.append(f"MFU: {rate(lambda record: record.mfu):.1%}")
    fields += [f"learning rate: {last.lr:.6E}", f"global batch size: {last.global_batch_size:5d}"]
    if losses:
        fields.append(f"lm loss: {sum(losses) / len(losses):.6E}")
    fields += [f"loss scale: {last.loss_scale:.1f}", f"grad norm: {last.grad_norm:.3f}"]
    fields += [_extra(name, value) for name, value in last.extra.items() if value is not None]
    now_text = "" if last.memory_now is None else f"{last.memory_now / GIB:.2f}/"
    fields += [
        f"memory (GiB): {now_text}{last.memory / GIB:.2f}",
        f"number of skipped iterations: {sum(record.skipped for record in records):3d}",
        f"number of nan iterations: {sum(record.nonfinite is not None for record in records):3d}",
    ]
    return " | ".join(fields) + " |"


def valid_line(record: ValidRecord) -> str:
    """One line for an evaluation, in the words of Megatron's log."""
    name = {"valid": "validation", "test": "test"}.get(record.split, record.split)
    return (
        f" {name} loss at iteration {record.step} | lm loss value: {record.loss:.6E} | "
        f"lm loss PPL: {record.perplexity:.6E} |"
    )


def print_summary(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the summary of a run (RunSummary.as_dict(), or summary.json read back)."""
    (console or Console()).print(summary_view(document))


def summary_view(document: Mapping[str, Any]) -> RenderableType:
    """The summary as tables: results, memory, choices, files."""
    parts: list[RenderableType] = [
        key_values(f"{document['name']}: {document['outcome']}", _results(document))
    ]
    if document.get("predicted_memory") or document.get("measured_memory_bytes"):
        parts.append(_memory(document))
    if document.get("ledger"):
        parts.append(waterfall_view(document["ledger"]))
    if document.get("fp8"):
        parts.append(_fp8(document["fp8"]))
    if document.get("choices"):
        parts.append(_choices(document["choices"]))
    if document.get("files"):
        parts.append(key_values("files", document["files"].items()))
    return Group(*parts)


def _results(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hardware = document["hardware"]
    many = hardware.get("num_devices", 1)
    yield "hardware", f"{many} x {hardware['name']}" if many > 1 else hardware["name"]
    yield "parameters", f"{document['parameters']:,} ({format_count(document['parameters'])})"
    skipped = f", {document['skipped_steps']} skipped" if document.get("skipped_steps") else ""
    yield "steps", f"{document['steps']:,}{skipped}, {format_count(document['consumed_tokens'])} tokens"
    yield "time", format_duration(document["wall_time_s"])
    for label, key in (("training loss", "train_loss"), ("validation loss", "valid_loss")):
        if document.get(key) is not None:
            yield (
                label,
                f"{document[key]:.4f} nats a token (perplexity {perplexity(document[key]):.4g})",
            )
    if document.get("unigram_loss") is not None:
        yield "unigram model", f"{document['unigram_loss']:.4f} nats a token (token frequencies alone)"
    if document.get("tokens_per_s"):
        yield "throughput", f"{document['tokens_per_s']:,.0f} tokens/s (median)"
    if document.get("step_time_s"):
        yield "step", f"{format_duration(document['step_time_s'])} (median)"
    ranks = document.get("ranks")
    if ranks and len(ranks["own_time_s"]) > 1:
        slowest = ranks["slowest_rank"]
        own = format_duration(ranks["own_time_s"][slowest])
        yield (
            "slowest rank",
            f"{slowest}, {own} of own work a step, {ranks['skew']:.1%} above the median rank",
        )
    for convention, facts in document.get("mfu", {}).items():
        yield f"MFU, {convention}", _mfu(facts)


def _mfu(facts: Mapping[str, Any]) -> str:
    rate = format_flops_per_s(facts["flops_per_s"])
    if facts["mfu"] is None:
        return f"n/a ({rate}; no known {facts['dtype']} peak)"
    peak = format_flops_per_s(facts["peak_flops_per_s"])
    stated = f"{facts['mfu']:.1%} = {rate} / {peak} {facts['dtype']} ({facts['peak_source']})"
    if facts["mfu"] <= 1:
        return stated
    return f"{stated}; above 100%: that peak is too low, as one is that was measured beside other work"


def _fp8(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The operands that lost most in their cast to fp8."""
    table = new_table("fp8: what casts lost in the step looked at last, worst first")
    table.add_column("GEMM", overflow="fold")  # a name cut short is two names
    table.add_column("operand")
    for header in ("largest", "scale", "cut off", "to 0"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        sizes = ("n/a" if row[name] is None else f"{row[name]:.3g}" for name in ("amax", "scale"))
        shares = (f"{row[name]:.2%}" for name in ("saturated", "underflowed"))
        table.add_row(row["site"], row["operand"], *sizes, *shares)
    return table


def _memory(document: Mapping[str, Any]) -> Table:
    predicted = document.get("predicted_memory") or {}
    measured, peak = document.get("measured_memory") or {}, document.get("measured_memory_bytes")
    then, saved = document.get("measured_after_forward"), document.get("measured_activations")
    table = memory_table(predicted, measured, peak, then, saved)
    if peak is not None:
        how = f" ({document['memory_measure']})" if document.get("memory_measure") else ""
        table.caption = f"measured{how}"
        if predicted.get("total") and peak and document["hardware"].get("kind") == "cuda":
            # On a CPU the measure counts whatever else the process holds, so their ratio would say little.
            table.add_row("predicted / measured", f"{predicted['total'] / peak:.2f}", "")
    return table


def memory_table(
    predicted: Mapping[str, Any],
    measured: Mapping[str, int] | None,
    peak: int | None,
    after_forward: int | None = None,
    activations: Mapping[str, Any] | None = None,
) -> Table:
    """Prediction and measurement by class, side by side.

    Args:
        predicted: StageMemory.as_dict().
        measured: bytes by class of a run; the classes that a step adds come as one sum.
        peak: measured in all.
        after_forward: measured when a forward pass had ended.
        activations: what a run counted of saved tensors, "by_module", or why they are "unknown".
    """
    table = new_table("memory")
    table.add_column("class")
    for header in ("predicted", "measured"):
        table.add_column(header, justify="right", no_wrap=True)
    left = dict(measured or {})
    for name, num_bytes in predicted.get("parts", {}).items():
        if num_bytes or left.get(name):
            found = left.pop(name, None)
            table.add_row(name.replace("_", " "), format_bytes(num_bytes), _bytes_or_blank(found))
    for name, num_bytes in left.items():
        if num_bytes:  # of what a step adds, by part above, the measurement knows the sum
            together = _added_by_a_step(predicted) if name == "activations_and_workspace" else None
            table.add_row(name.replace("_", " "), _bytes_or_blank(together), format_bytes(num_bytes))
    if predicted or peak is not None:
        total = predicted.get("total")
        table.add_section()
        table.add_row("peak", _bytes_or_blank(total), _bytes_or_blank(peak), style="bold")
    if after_forward is not None:
        then = predicted.get("moments", {}).get("forward")
        table.add_row("after the forward pass", _bytes_or_blank(then), format_bytes(after_forward))
    if predicted.get("beside"):
        table.add_row("beside the allocator", format_bytes(sum(predicted["beside"].values())), "")
    if predicted.get("host"):
        table.add_row("beside it in host memory", format_bytes(sum(predicted["host"].values())), "")
    if activations:
        _add_activations(table, predicted.get("saved") or {}, activations)
    return table


def _add_activations(table: Table, predicted: Mapping[str, int], activations: Mapping[str, Any]) -> None:
    """What a forward pass saves for its backward, module by module."""
    measured = activations.get("by_module")
    table.add_section()
    if not measured:
        reason = activations.get("unknown") or "nobody counted it"
        table.add_row(f"saved for backward: not known by module ({reason})", "", "")
        return
    for name in dict.fromkeys((*predicted, *measured)):
        found = measured.get(name, 0)
        table.add_row(f"saved by {name}", format_bytes(predicted.get(name, 0)), format_bytes(found))
    sums = (format_bytes(sum(sizes.values())) for sizes in (predicted, measured))
    table.add_row("saved for backward", *sums, style="bold")


def _added_by_a_step(predicted: Mapping[str, Any]) -> int | None:
    """Predicted activations and workspace, together."""
    parts: Mapping[str, int] = predicted.get("parts", {})
    return sum(size for name, size in parts.items() if name.startswith(("activations", "workspace"))) or None


def _bytes_or_blank(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _choices(choices: Sequence[Mapping[str, str]]) -> Table:
    table = new_table("choices")
    for header in ("what", "asked", "ran"):
        table.add_column(header, overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    for choice in choices:
        swapped = choice["asked"] not in ("auto", choice["ran"])
        table.add_row(
            choice["what"], choice["asked"], Text(choice["ran"], "yellow" if swapped else ""), choice["why"]
        )
    return table


def key_values(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A two-column table without a header; long values fold in a narrow terminal."""
    table = new_table(title)
    table.show_header = False
    table.add_column()
    table.add_column(overflow="fold", min_width=12)
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def _extra(name: str, value: float | int | str) -> str:
    label = name.replace("_", " ")
    return f"{label}: {value:.4g}" if isinstance(value, float) else f"{label}: {value}"
