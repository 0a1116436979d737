"""Text that cannot be prepared: file and line are named, and nothing of before is touched."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from .conftest import Refused

BYTES = "--tokenizer-type ByteTokenizer"
NUMBERS = "--tokenizer-type NullTokenizer"
NINE = f"{NUMBERS} --vocab-size 9"
PREPARE = "data prepare {} --output-prefix d/out --workers 1 "


@pytest.mark.parametrize(
    ("name", "raw", "flags", "code", "says"),
    [
        ("a.txt", b"caf\xe9", BYTES, 1, ["a.txt: ", "iconv", "--skip-bad-lines"]),
        ("a.txt", b"", BYTES, 1, ["no input file holds text"]),
        ("a.txt", b"", "--train-tokenizer 300", 1, ["no input file holds text"]),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', BYTES, 1, ["a.jsonl:2: "]),
        ("a.jsonl", b'{"text": "a"}\n{"body": "x"}\n', "--train-tokenizer 300", 1, ["a.jsonl:2: no text"]),
        ("a.jsonl", b'{"text": "1"}\n{"text": "7 99"}', NINE, 1, ["2: NullTokenizer: id 99 is"]),
        ("a.txt", b"word", NINE, 1, ["a.txt: NullTokenizer", "'word'"]),
        ("a.txt", b"word", NUMBERS, 2, ["NullTokenizer needs --vocab-size"]),
        ("a.txt", b"word", f"{BYTES} --vocab-size 9", 2, ["would not be read by ByteTokenizer"]),
        ("a.txt", b"word", "--train-tokenizer 300 --eod-token x", 2, ["--eod-token would not be read"]),
        ("a.txt", b"word", "--train-tokenizer 30", 2, ["too small for byte-level BPE", "257 or more"]),
        ("a.txt", b"word", "", 2, ["no tokenizer is named", "--train-tokenizer SIZE"]),
        ("a.jsonl.gz", b"\x1f\x8b\x08\0", BYTES, 1, ["a.jsonl.gz is cut short"]),
        ("a.parquet", b"PAR1", BYTES, 1, ["a.parquet cannot be read as Parquet"]),
    ],
)  # fmt: skip
def test_text_that_cannot_be_prepared(
    refused: Refused, tmp_path: Path, name: str, raw: bytes, flags: str, code: int, says: list[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / name).write_bytes(raw)
    refused(PREPARE.format(name) + flags, code, *says)


@pytest.mark.parametrize(
    ("prefix", "code", "says"),
    [
        ("d/", 2, "--output-prefix d/ names a folder"),
        (".", 2, "--output-prefix . names a folder"),
        ("a.txt/out", 1, "a file stands where a folder is needed"),
        ("/proc/nowhere/out", 1, "cannot write into /proc/nowhere"),
    ],
)
def test_output_that_cannot_be_written(
    refused: Refused, tmp_path: Path, prefix: str, code: int, says: str
) -> None:
    (tmp_path / "a.txt").write_text("words")
    refused(
        f"data prepare a.txt --output-prefix {prefix} --tokenizer-type ByteTokenizer --workers 1", code, says
    )


def test_a_file_that_may_not_be_read(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Simulated: the tests may run as root, to whom every file is readable."""

    def locked(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "d").mkdir()
    monkeypatch.setattr("redline.data.corpus._open", locked)
    says = "cannot read a.txt: Permission denied.", "correct its permissions"
    refused(PREPARE.format("a.txt") + BYTES, 1, *says)


def test_a_failure_keeps_the_tokenizer_of_older_data(refused: Refused, redline: Any, tmp_path: Path) -> None:
    """--overwrite that fails leaves the pair and the tokenizer of before, which belong together."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    words = PREPARE.format("a.txt") + "--train-tokenizer"
    assert redline(f"{words} 280")[0] == 0
    refused(f"{words} 280", 1, "out_tokenizer.json exists already", "--overwrite")
    (tmp_path / "b.txt").write_bytes(b"other words, broken \xff")
    refused(
        "data prepare a.txt b.txt --output-prefix d/out --workers 1 --train-tokenizer 270 --overwrite",
        1,
        "b.txt",
    )
    (tmp_path / "empty.txt").write_text("")
    refused(
        "data prepare empty.txt --output-prefix d/out --workers 1 --train-tokenizer 270 --overwrite",
        1,
        "no input",
    )
    code, out, _ = redline("data inspect d/out_text_document")
    assert code == 0 and "some words" in out


def test_a_tokenizer_without_an_end_token_b108(refused: Refused, tmp_path: Path) -> None:
    """B108: said before any file is written, with the option to set."""
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a a a")
    refused(
        PREPARE.format("a.txt") + "--tokenizer-model t.json", 2, "no end-of-document token", "--eod-token"
    )
