"""`redline data`: what it prints, which tokenizer it takes, and how it names mistakes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from redline.cli.data import main
from redline.config import parse_args
from redline.errors import ConfigError, DataError, UsageError


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a text file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt").write_text("one two three " * 30)
    return tmp_path


def prepare(*words: str) -> None:
    assert main(["prepare", "a b.txt", "--workers", "1", *words]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prepaer"], "did you mean `redline data prepare`?"),
        (["look"], "the verbs are prepare and inspect"),
        (["prepare"], "required: INPUT, --output-prefix"),
        (["prepare", "x", "--output-prefix", "o", "--overwite"], "did you mean --overwrite?"),
        (["inspect", "x", "--tokenizer-typ=B"], "did you mean --tokenizer-type?"),
        (["inspect", "x", "--documents", "-3"], "-3 is no whole number of at least 0"),
    ],
)
def test_usage(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        main(words)
    assert says in str(error.value)


def test_the_line_to_train_with_is_one(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quoted where it must be, and understood by `redline train`."""
    prepare("--output-prefix", "d e/x", "--train-tokenizer", "280")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("train with: "))
    program, command, *words = shlex.split(line.removeprefix("train with: "))
    config = parse_args([*words, "--train-iters", "1"]).config
    assert (program, command) == ("redline", "train")
    assert config.data.data_path == ("d e/x_text_document",)
    assert config.tokenizer.tokenizer_model == "d e/x_tokenizer.json"


def test_a_trained_tokenizer_appears_with_its_data(inside: Path) -> None:
    prepare("--output-prefix", "d/x", "--train-tokenizer", "280")
    assert sorted(path.name for path in (inside / "d").iterdir()) == [
        "x_text_document.bin",
        "x_text_document.idx",
        "x_text_document.json",
        "x_tokenizer.json",
    ]
    note = json.loads((inside / "d" / "x_text_document.json").read_text())
    assert note["tokenizer"]["tokenizer_model"] == str(inside / "d" / "x_tokenizer.json")


def test_existing_output_is_refused_before_the_tokenizer_is_trained(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("--output-prefix", "d/x", "--tokenizer-type", "ByteTokenizer")
    monkeypatch.setattr("redline.cli.data.train_bpe", lambda *_: pytest.fail("it trained"))
    with pytest.raises(DataError, match=r"x_text_document\.bin exists already"):
        main(["prepare", "a b.txt", "--output-prefix", "d/x", "--train-tokenizer", "280"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--vocab-size", "9"], "--vocab-size would not be read"),
        (["--tokenizer-model", "t.json", "--vocab-file", "v"], "--vocab-file would not be read by Hugging"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--eod-token", "x"], "by NullTokenizer"),
    ],
)
def test_no_tokenizer_option_is_ignored(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(["prepare", "a b.txt", "--output-prefix", "d/x", *words])


def test_inspect_decodes_by_the_tokenizer_beside(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("--output-prefix", "d/x", "--train-tokenizer", "280")
    main(["inspect", "d/x_text_document"])
    assert "one two three" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--eod-token 'zz' is not in the tokenizer's vocabulary"):
        main(["inspect", "d/x_text_document", "--eod-token", "zz"])
    (inside / "d" / "x_tokenizer.json").unlink()
    assert main(["inspect", "d/x_text_document"]) == 0
    found = capsys.readouterr()
    assert "x_tokenizer.json, which is not there. Documents are shown as ids." in found.err
    assert "one two three" not in found.out and "--- document 0" in found.out


def test_inspect_names_what_begins_so(inside: Path) -> None:
    prepare("--output-prefix", "d/x", "--tokenizer-type", "ByteTokenizer")
    for given in ("d/x", "d"):
        with pytest.raises(DataError) as error:
            main(["inspect", given])
        assert "did you mean d/x_text_document?" in str(error.value)
