"""`redline data prepare` and `inspect`: every input format, order, and every way a corpus can be bad."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from redline.cli.data import main
from redline.config import parse_args, with_values
from redline.data import corpus as corpus_module
from redline.data.corpus import find_corpus, texts_of
from redline.data.indexed import IndexedDataset
from redline.data.inspection import inspect
from redline.data.origin import note_fault, note_path, tokenizer_beside
from redline.data.prepare import PrepareSpec, prepare
from redline.data.tokenizer import ByteTokenizer, TokenizerSpec
from redline.data.writer import IndexedWriter
from redline.errors import ConfigError, DataError, UsageError
from redline.run.vocabulary import open_vocabulary

BYTES = TokenizerSpec(tokenizer_type="ByteTokenizer")


def spec(**changes: Any) -> PrepareSpec:
    return PrepareSpec(tokenizer=BYTES, **changes)


def documents(prefix: Path) -> list[str]:
    """The decoded documents, each ended by the end token."""
    return [ByteTokenizer().decode(ids.tolist()) for ids in IndexedDataset(prefix)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_lines(path: Path, *records: object) -> Path:
    text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def run(corpus: list[Path] | Path, out: Path, *args: str) -> int:
    inputs = [str(path) for path in ([corpus] if isinstance(corpus, Path) else corpus)]
    words = ["--output-prefix", str(out), "--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    return main(["prepare", *inputs, *words, *args])


class TestFormats:
    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
    def test_json_lines(self, tmp_path: Path, suffix: str) -> None:
        source = write_lines(tmp_path / f"a{suffix}", {"text": "one"}, "", {"x": 1, "text": "two"})
        assert run(source, tmp_path / "out") == 0
        assert documents(tmp_path / "out_text_document") == ["one<|endoftext|>", "two<|endoftext|>"]

    def test_text_files_and_folders_in_name_order(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a/z.md", "a/b/c.txt.gz", "skipped.bin", ".hidden.txt"):
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = f"text of {name}".encode()
            path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        run(tmp_path / "in", tmp_path / "out", "--no-append-eod")
        want = [".hidden.txt", "a/b/c.txt.gz", "a/z.md", "b.txt"]
        assert documents(tmp_path / "out_text_document") == [f"text of {name}" for name in want]

    def test_patterns_take_any_suffix(self, tmp_path: Path) -> None:
        (tmp_path / "src" / "deep").mkdir(parents=True)
        for name in ("x.c", "deep/y.c", "deep/n.h"):
            (tmp_path / "src" / name).write_text(name)
        run(tmp_path / "src" / "**" / "*.c", tmp_path / "out", "--no-append-eod")
        assert documents(tmp_path / "out_text_document") == ["deep/y.c", "x.c"]

    def test_parquet(self, tmp_path: Path) -> None:
        rows = [f"row {number}" for number in range(2500)]
        parquet.write_table(
            pyarrow.table({"body": rows, "id": range(2500)}), tmp_path / "a.parquet", row_group_size=700
        )
        run(tmp_path / "a.parquet", tmp_path / "out", "--json-keys", "body", "--no-append-eod")
        assert documents(tmp_path / "out_body_document") == rows

    def test_several_keys_and_a_forced_format(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.data", {"q": "why", "a": "because"}, {"q": "how", "a": ""})
        run(source, tmp_path / "o", "--json-keys", "q", "a", "--input-format", "jsonl", "--no-append-eod")
        assert documents(tmp_path / "o_q_document") == ["why", "how"]
        assert documents(tmp_path / "o_a_document") == ["because"]

    def test_mixed_inputs_in_the_order_given(self, tmp_path: Path) -> None:
        (tmp_path / "z.txt").write_text("first")
        lines = write_lines(tmp_path / "a.jsonl", {"text": "second"})
        run([tmp_path / "z.txt", lines], tmp_path / "out", "--no-append-eod")
        assert documents(tmp_path / "out_text_document") == ["first", "second"]

    def test_storage_follows_the_vocabulary(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "1 2"})
        for size, dtype in ((100, "uint16"), (65499, "int32")):  # one more id ends a document
            args = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
            main(["prepare", str(source), "--output-prefix", str(tmp_path / dtype), *args, "--workers", "1"])
            pair = IndexedDataset(tmp_path / f"{dtype}_text_document")
            assert pair.dtype.name == dtype and pair[0].tolist() == [1, 2, size]

    def test_pyarrow_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(DataError, match=r"(?s)needs the pyarrow package.*pip install pyarrow"):
            run(tmp_path / "a.parquet", tmp_path / "out")


class TestWorkers:
    def test_the_same_bytes_whatever_the_workers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records = [{"text": f"document {number} " * (number % 7)} for number in range(400)]
        source = write_lines(tmp_path / "a.jsonl", *records)
        monkeypatch.setattr(corpus_module, "CHUNK_BYTES", 500)
        corpus = find_corpus([str(source)])
        assert len(list(corpus.chunks())) > 20
        seen: list[int] = []
        digests = []
        for workers in (1, 2):
            report = prepare(corpus, tmp_path / str(workers), spec(num_workers=workers), progress=seen.append)
            assert report.num_empty == 58  # every seventh of 400
            prefix = report.prefixes["text"]
            pair = [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]
            digests.append([hashlib.md5(content).hexdigest() for content in pair])
        assert digests[0] == digests[1]
        assert sum(seen) == 2 * source.stat().st_size

    def test_an_error_in_a_worker_names_the_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(corpus_module, "CHUNK_BYTES", 20)
        source = write_lines(tmp_path / "a.jsonl", *[{"text": "good"}] * 5, '{"text": ', {"text": "x"})
        with pytest.raises(DataError, match=r"a\.jsonl:6: "):
            prepare(find_corpus([str(source)]), tmp_path / "out", spec(num_workers=2))
        assert files(tmp_path) == ["a.jsonl"]


class TestBadInput:
    """One paragraph, the right class, and nothing half-written."""

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ('{"text": "cut', "Unterminated string"),
            ("[1, 2]", "a JSON object is expected, not list"),
            ('{"body": "x"}', r"no text under 'text' \(the keys are \['body'\]\)"),
            ('{"text": 5}', r"no text under 'text' \(it is int\)"),
            ('{"text": "\\ud800"}', "surrogates not allowed"),
        ],
    )
    def test_a_malformed_line(self, tmp_path: Path, line: str, says: str) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "good"}, line, {"text": "also good"})
        with pytest.raises(DataError, match=rf"(?s)a\.jsonl:2: .*{says}.*--skip-bad-lines"):
            run(source, tmp_path / "out")
        assert files(tmp_path) == ["a.jsonl"]

    def test_skipped_lines_are_counted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "good"}, "{", {"text": ""}, {"text": "also"})
        (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
        run([source, tmp_path / "b.txt"], tmp_path / "out", "--skip-bad-lines", "--no-append-eod")
        assert documents(tmp_path / "out_text_document") == ["good", "also"]
        assert "left out: 1 empty, 2 malformed" in capsys.readouterr().out

    def test_text_that_is_no_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_bytes(b"fine \xff")
        with pytest.raises(DataError, match=r"b\.txt: 'utf-8' codec can't decode"):
            run(tmp_path / "b.txt", tmp_path / "out")

    @pytest.mark.parametrize("kind", ["missing", "folder", "pattern"])
    def test_no_input(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "empty").mkdir()
        given = {"missing": "nowhere.txt", "folder": "empty", "pattern": "*.nothing"}[kind]
        with pytest.raises(DataError, match="there is no input file"):
            run(tmp_path / given, tmp_path / "out")

    def test_an_empty_corpus(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": ""}, "")
        with pytest.raises(DataError, match=r"(?s)no input file holds text.*1 read.*empty: 1"):
            run(source, tmp_path / "out")
        assert files(tmp_path) == ["a.jsonl"]

    @pytest.mark.parametrize("keep", [30, -8])
    def test_a_gzip_file_cut_short(self, tmp_path: Path, keep: int) -> None:
        source = write_lines(tmp_path / "a.jsonl.gz", *[{"text": f"text {k}"} for k in range(50)])
        source.write_bytes(source.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"a\.jsonl\.gz is cut short"):
            run(source, tmp_path / "out")
        assert files(tmp_path) == ["a.jsonl.gz"]

    @pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
    @pytest.mark.parametrize("content", [b"plain text", gzip.compress(b"x" * 99, mtime=0)[:-9]])
    def test_what_cannot_be_decompressed_is_no_matter_of_utf8(
        self, name: str, content: bytes, tmp_path: Path
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="is cut short, damaged or no gzip file") as raised:
            run(tmp_path / name, tmp_path / "out")
        assert name in raised.value.what and "cannot be decompressed" in raised.value.why
        assert "download the file again" in raised.value.mend
        assert ("--skip-bad-lines" in raised.value.mend) is (name == "a.txt.gz")

    def test_parquet_cut_short_or_without_the_column(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"body": ["x"]}), path)
        with pytest.raises(DataError, match=r"(?s)no column text.*its columns are body"):
            run(path, tmp_path / "out")
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            run(path, tmp_path / "out")

    def test_no_end_token_before_any_file_b108(self, tmp_path: Path) -> None:
        """B108: the message names the option, and no file has been written."""
        from tokenizers import Tokenizer, models

        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
        source = write_lines(tmp_path / "a.jsonl", {"text": "a"})
        words = ["prepare", str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer-model"]
        words += [str(tmp_path / "tokenizer.json"), "--workers", "1"]
        with pytest.raises(ConfigError, match=r"(?s)--append-eod.*--eod-token"):
            main(words)
        assert files(tmp_path) == ["a.jsonl", "tokenizer.json"]
        assert main([*words, "--no-append-eod"]) == 0

    def test_existing_output_stays_unless_asked(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "new"})
        with IndexedWriter(tmp_path / "out_text_document", np.dtype("u2")) as writer:
            writer.add_document([104, 105])
        with pytest.raises(DataError, match=r"out_text_document\.bin exists already"):
            run(source, tmp_path / "out")
        assert documents(tmp_path / "out_text_document") == ["hi"]
        run(source, tmp_path / "out", "--overwrite", "--no-append-eod")
        assert documents(tmp_path / "out_text_document") == ["new"]

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "new"})

        def full(handle: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("redline.data.writer._sync", full)
        with pytest.raises(DataError, match="No space left on device"):
            run(source, tmp_path / "out")
        assert files(tmp_path) == ["a.jsonl"]

    def test_an_unusable_folder(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "new"})
        with pytest.raises(DataError, match=r"cannot write into .*a\.jsonl"):
            run(source, source / "out")

    def test_an_interrupt_leaves_nothing(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "new"})

        def interrupt(num_bytes: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(find_corpus([str(source)]), tmp_path / "out", spec(), progress=interrupt)
        assert files(tmp_path) == ["a.jsonl"]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["prepare"], "required"),
            (["prepare", "x"], "--output-prefix"),
            (
                ["prepare", "x", "--output-prefix", "o", "--workers", "0"],
                "0 is no whole number of at least 1",
            ),
            (["prepare", "x", "--output-prefix", "o"], "no tokenizer is named"),
            (
                [
                    "prepare",
                    "x",
                    "--output-prefix",
                    "o",
                    "--train-tokenizer",
                    "300",
                    "--tokenizer-model",
                    "m",
                ],
                "excludes",
            ),
            (["prepare", "x", "--output-prefix", "o", "--no-such-flag"], "--no-such-flag"),
        ],
    )
    def test_usage(self, words: list[str], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            main(words)


class TestTrainedTokenizer:
    def test_prepare_trains_encodes_and_inspect_decodes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        texts = [f"the sum of {k} and {k + 1} is {2 * k + 1}" for k in range(60)]
        source = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
        words = ["prepare", str(source), "--output-prefix", str(tmp_path / "d" / "out"), "--workers", "1"]
        assert main([*words, "--train-tokenizer", "280"]) == 0
        model = tmp_path / "d" / "out_tokenizer.json"
        assert f"--tokenizer-model {model}" in capsys.readouterr().out
        with pytest.raises(DataError, match=r"out_tokenizer\.json exists already"):
            main([*words, "--train-tokenizer", "280"])
        prefix = tmp_path / "d" / "out_text_document"
        assert main(["inspect", str(prefix), "--tokenizer-model", str(model), "--documents", "2"]) == 0
        text = capsys.readouterr().out
        found = tokenizer_beside(prefix)
        assert found is not None and found.tokenizer_model == str(model.resolve())
        assert f"--- document 1\n{texts[1]}<|endoftext|>" in text and "document 2" not in text
        assert "60 sequences end with one" in text


class TestNote:
    """The tokenizer beside the data."""

    def test_null_tokenizer(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "a.jsonl", {"text": "1 2"})
        null = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=100)
        prepare(find_corpus([str(source)]), tmp_path / "out", PrepareSpec(tokenizer=null))
        assert tokenizer_beside(tmp_path / "out_text_document.bin") == null

    def test_a_note_of_other_data_is_ignored(self, tmp_path: Path) -> None:
        run(write_lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "out")
        with IndexedWriter(tmp_path / "out_text_document", np.dtype("u2"), overwrite=True) as writer:
            writer.add_document([1])
        assert tokenizer_beside(tmp_path / "out_text_document") is None
        (tmp_path / "tokenizer.json").write_text("{}")
        found = tokenizer_beside(tmp_path / "out_text_document")
        assert found is not None and found.tokenizer_model == str(tmp_path / "tokenizer.json")

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_tokens": 4, "tokenizer": {"x": 1}}'])
    def test_a_broken_note_is_ignored(self, tmp_path: Path, content: str) -> None:
        run(write_lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "out")
        (tmp_path / "out_text_document.json").write_text(content)
        assert tokenizer_beside(tmp_path / "out_text_document") is None

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ('{"num_', "is not whole JSON"),
            ("{}", "does not name the tokenizer"),
            (
                json.dumps({"num_tokens": 9, "tokenizer": {"tokenizer_type": "x"}}),
                "of 9 tokens, and",
            ),
        ],
    )
    def test_why_a_note_is_ignored_is_said(
        self, content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(write_lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "out")
        prefix = tmp_path / "out_text_document"
        assert note_fault(prefix) is None
        note_path(prefix).write_text(content)
        fault = note_fault(prefix)
        assert fault is not None and says in fault and fault.startswith(str(note_path(prefix)))
        capsys.readouterr()
        assert main(["inspect", str(prefix)]) == 0
        assert f"tokenizer    not known, documents are shown as ids: {fault}" in capsys.readouterr().out
        config = parse_args(
            f"--data-path {prefix} --train-iters 1 --num-layers 2 --hidden-size 8 "
            "--num-attention-heads 2".split()
        ).config
        with pytest.raises(ConfigError) as raised:
            open_vocabulary(config, [str(prefix)])
        assert raised.value.why.startswith(fault)
        assert open_vocabulary(with_values(config, {"vocab_size": 300}), [str(prefix)]).notices == (
            f"{fault}; it is ignored.",
        )
        note_path(prefix).unlink()
        assert note_fault(prefix) is None


class TestInspect:
    @pytest.fixture
    def prefix(self, tmp_path: Path) -> Path:
        with IndexedWriter(tmp_path / "x", np.dtype("i4")) as writer:
            for length in (0, 1, 2, 3, 4, 250):
                writer.add_document(np.arange(length) + 5)
        return tmp_path / "x"

    def test_facts(self, prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(prefix), "--json", "--documents", "6"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["num_documents"], found["num_tokens"], found["num_empty"]) == (6, 260, 1)
        assert (found["dtype"], found["min_id"], found["max_id"]) == ("int32", 5, 254)
        assert found["num_bytes"] == 260 * 4 + 34 + 12 * 6 + 8 * 7
        assert found["percentiles"]["50"] == 2 and found["percentiles"]["100"] == 250
        bins = [row for row in found["histogram"] if row[2]]
        assert bins == [[0, 1, 1], [1, 2, 1], [2, 4, 2], [4, 8, 1], [128, 256, 1]]
        assert found["documents"][3] == "5 6 7"
        assert found["documents"][5].endswith("204 ... (50 more tokens)")
        assert found["num_end_tokens"] is None

    def test_text(self, prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["inspect", str(prefix)])
        text = capsys.readouterr().out
        assert "260 tokens of int32" in text and "verified" in text and "####" in text

    def test_ids_beyond_the_tokenizer(self, prefix: Path) -> None:
        with pytest.raises(DataError, match="holds token ids 5 to 254"):
            main(["inspect", str(prefix), "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"])
        assert inspect(prefix, ByteTokenizer()).num_end_tokens == 0

    def test_an_empty_pair(self, tmp_path: Path) -> None:
        with IndexedWriter(tmp_path / "x", np.dtype("u2")):
            pass
        found = inspect(tmp_path / "x")
        assert (found.num_tokens, found.min_id, found.histogram) == (0, None, [])
        assert "0 tokens" in found.as_text()


def test_texts_of_a_chunk_keep_their_order(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", *({"text": str(k)} for k in range(5)))
    (chunk,) = find_corpus([str(source)]).chunks()
    assert texts_of(chunk, ("text",)).by_key == {"text": ["0", "1", "2", "3", "4"]}


def test_preparing_needs_no_torch(tmp_path: Path) -> None:
    """The command and its workers start without importing torch."""
    code = "import sys, redline.cli.data; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
