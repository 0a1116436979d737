"""`redline bench CASE`: measure this machine."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redline.errors import UsageError
from redline.units import format_bytes, format_count, format_duration

USAGE = """\
Measure this machine. Results go to a JSON file that names commit, versions and device.

usage: redline bench step [--steps N] [--out FILE] [CONFIG.toml] [flags of `redline train`]
       redline bench data [--tokens N] [--out FILE]

  step   whole optimizer steps: tokens/s, MFU, peak memory (default: 10 steps of the demo)
  data   document, sample and shuffle indices of a corpus of short documents (default: 100 million tokens)

  --out FILE      where the result goes (default: bench-CASE.json)
  --commit REV    the code's commit, where git cannot tell it"""
CASES = ("step", "data")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and write its result."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    case, *rest = words
    if case not in CASES:
        near = difflib.get_close_matches(case, CASES, n=1)
        raise UsageError(
            f"there is no benchmark {case!r}.",
            why=f"the benchmarks are {', '.join(CASES)}.",
            mend=f"did you mean `redline bench {near[0]}`?" if near else "see `redline bench --help`.",
        )
    out = Path(_take(rest, "--out", f"bench-{case}.json"))
    commit = _take(rest, "--commit", "") or None
    device, row = _step(rest) if case == "step" else _data(rest)

    from redline.bench import write_result

    write_result(out, case, device, [row], commit)
    print(f"written to {out}")
    return 0


def _step(words: list[str]) -> tuple[str, dict[str, Any]]:
    from redline.config import parse_args, read_environment

    steps = _take_count(words, "--steps", 10)
    parsed = parse_args(words)

    from redline.bench import bench_step

    row = bench_step(parsed, read_environment(), steps=steps, say=print)
    half = row["mfu"]["causal-half"]["mfu"]
    print(
        f"{row['case']}: {row['tokens_per_s']:,.0f} tokens/s, {format_duration(row['step_time_s'])} a step, "
        f"MFU {'n/a' if half is None else f'{half:.1%}'} (causal-half), "
        f"peak {format_bytes(row['peak_memory_bytes'])} "
        f"(predicted {format_bytes(row['predicted_memory']['total'])})"
    )
    device = next(choice["ran"] for choice in row["choices"] if choice["what"] == "device")
    return device, row


def _data(words: list[str]) -> tuple[str, dict[str, Any]]:
    from redline.bench import data_index_case

    num_tokens = _take_count(words, "--tokens", 100_000_000)
    if words:
        raise UsageError(f"redline bench data knows no {words[0]!r}.", mend="see `redline bench --help`.")
    row = data_index_case(num_tokens=num_tokens)
    one = row["one_epoch"]
    print(
        f"{format_count(row['num_tokens'])} tokens in {format_count(row['num_documents'])} documents: indices of "
        f"one epoch in {format_duration(one['seconds'])} ({format_count(one['tokens_per_s'])} tokens/s)"
    )
    return "cpu", row


def _take(words: list[str], flag: str, default: str) -> str:
    """Remove `flag VALUE` or `flag=VALUE` from the words and return the value."""
    for index, word in enumerate(words):
        name, joined, value = word.partition("=")
        if name != flag:
            continue
        if joined:
            del words[index]
            return value
        if index + 1 == len(words):
            raise UsageError(f"{flag} needs a value.", mend="see `redline bench --help`.")
        value = words[index + 1]
        del words[index : index + 2]
        return value
    return default


def _take_count(words: list[str], flag: str, default: int) -> int:
    text = _take(words, flag, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} {text}: not a whole number above 0.", mend=f"for example {flag} {default}.")
    return int(text)
