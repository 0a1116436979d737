"""`redline bench CASE`: measure this machine."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from redline.errors import RedlineError, UsageError
from redline.files import os_errors_as
from redline.units import format_bytes, format_count, format_duration

USAGE = """\
Measure this machine. Results go to a JSON file that names commit, versions and device.

usage: redline bench step [--steps N] [--compare] [--operators] [--packed] [--out FILE]
                          [CONFIG.toml] [flags of `redline train`]
       redline bench attention [--quick] [--out FILE]
       redline bench kernels [--only NAME,...] [--quick] [--out FILE]
       redline bench comm [--nproc-per-node N] [--quick] [--out FILE]        (or under torchrun)
       redline bench gemm [--out FILE]
       redline bench data [--tokens N] [--out FILE]

  step       whole optimizer steps: tokens/s, MFU, peak memory (default: 10 steps of the demo)
  attention  each attention backend, checked, then timed over head sizes, lengths, groups, packed or not; and
             whether --attention-backend auto takes the best
  kernels    each fused operator, checked, then timed beside its plain twin, torch.compile, liger, quack; what
             each allocates beyond its inputs
  comm       all-reduce, all-gather, reduce-scatter and send over the ranks of the job, 64 KiB to 1 GiB (on
             CPUs to 4 MiB): seconds, and the line through them, beside what the cost model assumes
  gemm       weight gradients added inside their GEMM beside a GEMM and an addition, at every linear of the
             1B and 8B models; whole steps by flat buffers beside a plain loop
  data       document, sample and shuffle indices of a corpus of short documents (default: 100 million tokens)

  --steps N       steps to measure, after 3 that warm up (default: 10); a run whose length is not stated has
                  as many as this takes
  --compare       the step eager and compiled, plain and fused, and from a CUDA graph
  --operators     the step with plain operators, with fused ones, with the embedding and with the optimizer
                  plain again, and with the residual in the norm; GEMMs and attention are alike
  --packed        skewed documents packed, beside samples that are one document each (give no data)
  --only NAME,... these operators alone, by commas or repeated: adamw, bias_dropout_add, bias_geglu,
                  bias_gelu, bias_squared_relu, bias_swiglu, cross_entropy, embedding, fp8, grad_norm,
                  layer_norm, linear_cross_entropy, masked_softmax, qk_norm, rms_norm, rotary; or, as options
                  and record have them, norm, residual_norm, rope, activation
  --quick         one case an operator (two of rotary, and of head and loss); of attention, few
                  shapes; of comm, every other size
  --nproc-per-node N   processes to start here
  --tokens N      size of the corpus (default: 100000000)
  --out FILE      where the result goes, in place of an older one (default: bench-CASE.json)
  --commit REV    the code's commit, where git cannot tell it

examples:
  redline bench step
  redline bench step --preset llama3.2-1b --mock-data --train-iters 20 --steps 10 --out 1b.json
  redline bench attention --quick
  redline bench kernels --only norm,linear_cross_entropy"""
SOURCES = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data"),
    *("data_args_path", "per_split_data_args_path"),
)
CASES = ("step", "attention", "kernels", "comm", "gemm", "data")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and write its result."""
    words = list(argv)
    if not words or "-h" in words or "--help" in words:
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
    _require_writable(out)  # before the measurement, not after it
    keep = partial(_keep, out, case, commit)
    measures: dict[str, Callable[[list[str]], Measured]] = {
        "step": partial(_step, keep=keep),
        "attention": partial(_attention, keep=keep),
        "kernels": partial(_kernels, keep=keep),
        "comm": partial(_comm, out=out, commit=commit),
        "gemm": _gemm,
        "data": _data,
    }
    device, rows, code = measures[case](rest)
    if not rows:  # another process has them
        return code

    written = keep(device, rows)
    print(f"written to {out}" if written else f"nothing was measured, and nothing written to {out}")
    return code


def _keep(out: Path, case: str, commit: str | None, device: str, rows: list[dict[str, Any]]) -> bool:
    """Write the rows there are: also after each one of a long measurement, which may be cut short.

    Rows without a figure are not written, which would cost an older result of that name; whether these were.
    """
    if all("error" in row for row in rows):
        return False

    from redline.bench import write_result

    write_result(out, case, device, rows, commit)
    return True


def _require_writable(path: Path) -> None:
    with os_errors_as(RedlineError, path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# Each returns the device, the rows and the exit code.
Measured = tuple[str, list[dict[str, Any]], int]
Keep = Callable[[str, list[dict[str, Any]]], bool]


def _step(words: list[str], *, keep: Keep) -> Measured:
    from redline.config import parse_args, read_environment

    steps = _take_count(words, "--steps", 10)
    flags = ("--compare", "--operators", "--packed")
    compare, operators, packed = (_take_switch(words, flag) for flag in flags)
    _complete(words, steps, packed=packed)
    parsed = parse_args([*words, *(["--mock-data"] if packed else [])])

    from redline.bench import bench_step, compare_implementations, compare_operators, compare_packing
    from redline.run.data import data_prefixes, wants_demo_corpus
    from redline.run.vocabulary import open_vocabulary

    if (compare or operators or packed) and not wants_demo_corpus(parsed.config):
        # What no row could do without is said once, before all of them.
        open_vocabulary(parsed.config, data_prefixes(parsed.config, None))

    environment = read_environment()
    rows: list[dict[str, Any]] = []

    def keep_beside(before: list[dict[str, Any]]) -> Callable[[list[dict[str, Any]]], bool]:
        return lambda found: keep(_device_of(before + found), before + found)

    for wanted, measure in (
        (compare, compare_implementations),
        (operators, compare_operators),
        (packed, compare_packing),
    ):
        if wanted:
            kept = keep_beside(list(rows))
            rows += measure(words, environment, steps=steps, say=_at_once, keep=kept)
    if not rows:
        rows.append(bench_step(parsed, environment, steps=steps, say=_at_once))
    for row in rows:
        print(_step_line(row))
    return _device_of(rows), rows, int(any("error" in row for row in rows))


def _complete(words: list[str], steps: int, *, packed: bool) -> None:
    """Give a run that states no length the one that is measured; refuse data beside those of --packed."""
    from redline.bench.step import WARMUP_STEPS
    from redline.config import parse_args

    parsed = parse_args(words, training=False)
    given = [f"--{name.replace('_', '-')}" for name in SOURCES if name in parsed.explicit]
    if packed and given:
        raise UsageError(
            f"--packed and {given[0]} exclude each other.",
            why="--packed brings its own data.",
            mend=f"leave {' and '.join(given)} out.",
        )
    train = parsed.config.train
    if train.train_iters is None and train.train_samples is None:
        words += ["--train-iters", str(WARMUP_STEPS + steps + 1)]  # one more shows attention in place


def _device_of(rows: list[dict[str, Any]]) -> str:
    """Where the rows were measured, as the first that succeeded has it."""
    chosen: list[dict[str, str]] = next((row["choices"] for row in rows if "error" not in row), [])
    return next((choice["ran"] for choice in chosen if choice["what"] == "device"), "unknown")


def _step_line(row: dict[str, Any]) -> str:
    name = f"{row['variant']}: " if "variant" in row else ""
    if "error" in row:
        return f"{name}{row['error']}"
    half = row["mfu"]["causal-half"]["mfu"]
    ratio = f", {row['ratio']:.3f} of the first" if "ratio" in row else ""
    place = row.get("attention") or {}
    attention = (
        f", {place['backend']} attention at {place['in_place_flops_per_s'] / 1e12:.0f} TFLOP/s "
        f"({place['share']:.0%} of alone)"
        if "share" in place
        else ""
    )
    return (
        f"{name}{row['case']}: {row['tokens_per_s']:,.0f} tokens/s{ratio}, "
        f"{format_duration(row['step_time_s'])} a step, "
        f"MFU {'n/a' if half is None else f'{half:.1%}'} (causal-half), "
        f"peak {format_bytes(row['peak_memory_bytes'])} "
        f"(predicted {format_bytes(row['predicted_memory']['total'])}){attention}"
    )


def _attention(words: list[str], *, keep: Keep) -> Measured:
    quick = "--quick" in words
    words[:] = [word for word in words if word != "--quick"]
    if words:
        raise UsageError(
            f"redline bench attention knows no {words[0]!r}.", mend="see `redline bench --help`."
        )

    import torch

    from redline.bench.attention import all_right, bench_attention
    from redline.config import read_environment
    from redline.report.attention import print_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    calibration = read_environment().cache_dir / "calibration.json"
    rows = bench_attention(
        device, quick=quick, calibration=calibration, say=_at_once, keep=partial(keep, device)
    )
    print_attention(rows)
    return device, rows, 0 if all_right(rows) else 1


def _kernels(words: list[str], *, keep: Keep) -> Measured:
    only: list[str] = []
    while any(word.partition("=")[0] == "--only" for word in words):
        only.append(_take(words, "--only", ""))
    quick = _take_switch(words, "--quick")
    if words:
        raise UsageError(f"redline bench kernels knows no {words[0]!r}.", mend="see `redline bench --help`.")

    import torch

    from redline.bench.kernels import FULL, QUICK, all_passed, bench_kernels, cases_of
    from redline.report.kernels import print_kernels

    effort = QUICK if quick else FULL
    cases_of(only, effort)  # a misspelt name is said first
    if not torch.cuda.is_available():
        raise UsageError(
            "timing kernels needs a GPU, and PyTorch finds none here.",
            why="on a CPU they run interpreted, thousands of times slower.",
            mend="run this on a machine with an NVIDIA GPU; `make test` checks their results anywhere.",
        )
    rows = bench_kernels(only, effort, _at_once, partial(keep, "cuda"))
    print_kernels([row for row in rows if "error" not in row])
    return "cuda", rows, 0 if all_passed(rows) else 1


def _comm(words: list[str], *, out: Path, commit: str | None) -> Measured:
    number = _take(words, "--nproc-per-node", "")
    quick = _take_switch(words, "--quick")
    if words:
        raise UsageError(f"redline bench comm knows no {words[0]!r}.", mend="see `redline bench --help`.")

    from redline.config import read_environment

    environment = read_environment()
    if number and not environment.launched:
        if not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--nproc-per-node {number}: not a whole number above 0.", mend="for example 2.")

        from redline.comm.elastic import launch

        again = ["bench", "comm", "--out", str(out), *(["--quick"] if quick else [])]
        again += ["--commit", commit] if commit else []
        return "", [], launch(again, nproc_per_node=int(number), max_restarts=0)

    import torch

    from redline.bench.comm import bench_comm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, bench_comm(environment, device_type=device, quick=quick, say=_at_once), 0


def _gemm(words: list[str]) -> Measured:
    if words:
        raise UsageError(f"redline bench gemm knows no {words[0]!r}.", mend="see `redline bench --help`.")

    import torch

    from redline.bench.gemm import bench_gemm
    from redline.config import read_environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, bench_gemm(read_environment(), device_type=device, say=_at_once), 0


def _at_once(text: str) -> None:
    print(text, flush=True)


def _data(words: list[str]) -> Measured:
    from redline.bench import data_index_case

    num_tokens = _take_count(words, "--tokens", 100_000_000)
    if words:
        raise UsageError(f"redline bench data knows no {words[0]!r}.", mend="see `redline bench --help`.")
    row = data_index_case(num_tokens=num_tokens)
    one = row["one_epoch"]
    print(
        f"{format_count(row['num_tokens'])} tokens in {format_count(row['num_documents'])} documents: "
        f"indices of one epoch in {format_duration(one['seconds'])}, "
        f"{format_count(one['tokens_per_s'])} tokens/s"
    )
    return "cpu", [row], 0


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


def _take_switch(words: list[str], flag: str) -> bool:
    """Remove `flag` from the words; whether it was there."""
    given = flag in words
    words[:] = [word for word in words if word != flag]
    return given


def _take_count(words: list[str], flag: str, default: int) -> int:
    text = _take(words, flag, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} {text}: not a whole number above 0.", mend=f"for example {flag} {default}.")
    return int(text)
