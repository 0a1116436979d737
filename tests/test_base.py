"""The ground floor: errors, choices, units, atomic files, counter-based random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from redline import rng
from redline.choice import Choice
from redline.errors import CheckpointError, ConfigError, DataError, RedlineError, UsageError, first_line
from redline.files import os_errors_as, write_atomic, write_json_atomic, write_text_atomic
from redline.units import format_bytes, format_count, format_duration, format_flops_per_s


def test_error_says_what_why_and_mend() -> None:
    text = str(ConfigError("--tp 3 cannot split 16 heads.", why="whole heads.", mend="use 2 or 4."))
    assert text.splitlines() == [
        "ConfigError: --tp 3 cannot split 16 heads.",
        "  why:  whole heads.",
        "  mend: use 2 or 4.",
    ]
    assert ConfigError("x").exit_code == UsageError("x").exit_code == 2
    assert DataError("x").exit_code == CheckpointError("x").exit_code == 1


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("torn\nat page 3"), "torn"),
        (ValueError("\n torn"), "torn"),
        (ValueError(" \n"), "ValueError"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_first_line_of_any_error(error: Exception, wanted: str) -> None:
    assert first_line(error) == wanted


def test_choice_knows_a_fallback() -> None:
    assert not Choice("attention-backend", "auto", "flash", "fastest here").is_fallback
    assert not Choice("attention-backend", "flash", "flash", "as asked").is_fallback
    assert Choice("attention-backend", "flash", "unfused", "dropout").is_fallback


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(3 << 30), "3.00 GiB"),
        (format_bytes(12), "12 B"),
        (format_count(1_235_814_400), "1.24B"),
        (format_count(512), "512"),
        (format_flops_per_s(6.5e14), "650 TFLOP/s"),
        (format_flops_per_s(42.0), "42 FLOP/s"),
        (format_duration(75), "1m15s"),
        (format_duration(0.0021), "2.1 ms"),
        (format_duration(7300), "2h01m"),
        (format_duration(3599.7), "1h00m"),
        (format_duration(59.96), "1m00s"),
    ],
)
def test_units(text: str, wanted: str) -> None:
    assert text == wanted


def test_atomic_write_replaces_or_leaves_alone(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text_atomic(target, "old")

    def fail(handle: object) -> None:
        handle.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomic(target, fail)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]

    write_json_atomic(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(target, float("nan"))
    assert json.loads(target.read_text()) == {"a": 1}


def test_os_errors_name_the_path(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "file"
    with (
        pytest.raises(DataError, match=r"cannot read .*no/file: No such file"),
        os_errors_as(DataError, missing, "read"),
    ):
        missing.read_bytes()


def test_philox_known_answers() -> None:
    """The published test vectors of Philox 4x32-10 (Random123's kat_vectors)."""
    ones = 0xFFFFFFFF
    assert rng.philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert rng.philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert rng.philox((0xA4093822, 0x299F31D0), pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_streams_are_named() -> None:
    assert rng.stream_key(1, "dropout", 0, "mlp") == rng.stream_key(1, "dropout", 0, "mlp")
    keys = {rng.stream_key(seed, "dropout", layer, "mlp") for seed in range(4) for layer in range(64)}
    assert len(keys) == 4 * 64
    assert rng.stream_key(1, "a", "bc") != rng.stream_key(1, "ab", "c")


@pytest.mark.parametrize("lanes", [rng.HIDDEN_LANES, rng.ATTENTION_LANES])
def test_applied_probability(lanes: rng.Lanes) -> None:
    """The nearest step, never 0 or 1 unless asked for; scale x survivors is 1 but for a rounding."""
    most = 2**lanes.bits
    assert lanes.in_block * lanes.bits == 128
    assert lanes.threshold(0.0) == 0 and lanes.scale(0.0) == 1.0
    assert lanes.threshold(0.5) == most // 2 and lanes.scale(0.5) == 2.0
    assert lanes.threshold(1e-30) == 1 and lanes.threshold(1 - 1e-16) == most - 1
    for probability in (1e-30, 1e-5, 0.1, 0.3, 0.9, 1 - 1e-16):
        step = lanes.threshold(probability)
        away = abs(step - Fraction(probability) * most)
        assert away <= Fraction(1, 2) or (step in (1, most - 1) and away <= 1)
        survivors = 1 - Fraction(step, most)
        assert abs(Fraction(lanes.scale(probability)) * survivors - 1) <= Fraction(1, 2**53)


@pytest.mark.parametrize("module", ["errors", "choice", "units", "files", "rng", "formulas.shape"])
def test_ground_floor_imports_no_torch(module: str) -> None:
    code = f"import sys, redline.{module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_base_error_is_catchable() -> None:
    with pytest.raises(RedlineError):
        raise DataError("x")
