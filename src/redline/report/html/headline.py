"""The few numbers that a run comes to, each with what it was made from."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.ledger import perplexity
from redline.report.html.runs import RunData
from redline.report.html.values import mapping, number
from redline.units import format_bytes, format_duration, format_flops_per_s


@dataclass(frozen=True, slots=True)
class Figure:
    """One number.

    Attributes:
        key: stable name.
        value: None where it is not known: then `text` is "n/a" and `note` says why.
        better: 1 where more is better, -1 where less is, 0 where that depends.
    """

    key: str
    label: str
    value: float | None
    text: str
    note: str = ""
    better: int = 0


def headline(run: RunData, price: float | None) -> list[Figure]:
    """Throughput, MFU in each convention, memory, losses, and the cost at `price` per GPU and hour."""
    rate = tokens_per_s(run)
    median = "median" if run.summary else "median of metrics.jsonl"
    figures = [
        _figure("tokens_per_s", "Tokens/s", rate, "{:,.0f}", f"{median}, all devices together", 1),
        *_mfu(run),
        _memory(run),
        _loss(run, "train_loss", "Training loss", [record.get("loss") for record in run.steps]),
        _loss(run, "valid_loss", "Validation loss", [record.get("loss") for record in run.valid]),
    ]
    step_s = number(run.summary.get("step_time_s")) or run.record.step_s
    text = "n/a" if step_s is None else format_duration(step_s)
    figures.append(Figure("step_time_s", "Step", step_s, text, f"{median}, warm-up left out"))
    if price is not None:
        figures.append(_cost(run, rate, price))
    return figures


def tokens_per_s(run: RunData) -> float | None:
    """The median rate of all devices together."""
    stated = number(run.summary.get("tokens_per_s"))
    if stated is not None or run.record.tokens_per_s is not None:
        return stated if stated is not None else run.record.tokens_per_s
    rates = [rate for rate in (number(each.get("tokens_per_s")) for each in run.steps) if rate is not None]
    return statistics.median(rates) if rates else None  # a run of a few steps is all warm-up


def cost_per_billion(tokens_per_s: float, devices: int, price: float) -> float:
    """What 1e9 tokens cost on `devices` at `price` an hour each."""
    return 1e9 / tokens_per_s / 3600 * devices * price


def _figure(key: str, label: str, value: float | None, form: str, note: str, better: int = 0) -> Figure:
    return Figure(key, label, value, "n/a" if value is None else form.format(value), note, better)


def _mfu(run: RunData) -> Iterator[Figure]:
    stated = mapping(run.summary.get("mfu"))
    for convention, facts in stated.items():
        yield _utilisation(str(convention), mapping(facts))
    if not stated:
        half = run.record.mfu
        note = "median of metrics.jsonl, attention at half" if half else "no known peak"
        yield _figure("mfu.causal-half", "MFU, causal-half", half, "{:.1%}", note, 1)
        twice = _full_over_half(run)
        if half and twice:
            note = "the same with all of attention, by the FLOPs in ledger.json"
            yield _figure("mfu.full", "MFU, full", half * twice, "{:.1%}", note, 1)


def _full_over_half(run: RunData) -> float | None:
    """Model FLOPs with all S x S products of attention over those with half; None where that is not known.

    A window sees less than half, so that its products are no longer twice what was counted.
    """
    reference = None if run.account is None else run.account.reference
    if reference is None or reference.convention != "causal-half" or reference.flops_source != "model":
        return None
    if (
        not reference.model_flops
        or reference.attention_flops is None
        or run.options.get("model.window_size", not run.options)
    ):
        return None
    return 1 + reference.attention_flops / reference.model_flops


def _utilisation(convention: str, facts: Mapping[str, Any]) -> Figure:
    rate, peak = number(facts.get("flops_per_s")), number(facts.get("peak_flops_per_s"))
    dtype = facts.get("dtype") or ""
    top = "" if rate is None else format_flops_per_s(rate)
    over = f" / {format_flops_per_s(peak)} {dtype}" if peak else f"; no known {dtype} peak"
    return _figure(
        f"mfu.{convention}", f"MFU, {convention}", number(facts.get("mfu")), "{:.1%}", top + over, 1
    )


def _memory(run: RunData) -> Figure:
    measured = number(run.record.memory_bytes)
    predicted = number(mapping(run.summary.get("predicted_memory")).get("total"))
    note = "no prediction" if predicted is None else f"predicted {format_bytes(predicted)}"
    text = "n/a" if measured is None else format_bytes(measured)
    return Figure("memory_bytes", "Peak memory", measured, text, note, -1)


def _loss(run: RunData, key: str, label: str, recorded: Sequence[Any]) -> Figure:
    """Of summary.json, else the last that was recorded."""
    values = [value for value in map(number, recorded) if value is not None]
    stated = number(run.summary.get(key))
    value = stated if stated is not None else values[-1] if values else None
    if value is None:
        return Figure(key, label, None, "n/a", "none recorded", -1)
    note = f"nats a token; perplexity {perplexity(value):.4g}"
    unigram = number(run.summary.get("unigram_loss"))
    if key == "valid_loss" and unigram is not None:
        note += f"; unigram model {unigram:.4f}"
    return _figure(key, label, value, "{:.4f}", note, -1)


def _cost(run: RunData, rate: float | None, price: float) -> Figure:
    key, label, devices = "cost_per_billion", "Cost of a billion tokens", run.devices
    if not rate or devices is None:
        why = "the throughput is not known" if not rate else "nothing says how many devices trained"
        return Figure(key, label, None, "n/a", why, -1)
    each = f"{devices} device{'s' * (devices > 1)} at {price:,.2f} an hour"
    return _figure(key, label, cost_per_billion(rate, devices, price), "{:,.2f}", each, -1)
