"""From text to a trained model by the commands a user types: prepare, inspect, train."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from .conftest import Run

SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 6 --eval-iters 2 --lr 1e-2 --hidden-dropout 0 --attention-dropout 0 "
    "--num-workers 0 --device cpu --threads 1"
)
TEXTS = [f"the sum of {k} and {k + 1} is {2 * k + 1}, and so on\n" for k in range(120)]


def write_text(folder: Path) -> str:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_text(text)
    return str(folder)


def write_lines(path: Path, texts: list[str] = TEXTS) -> str:
    lines = "".join(
        json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)
    ).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def write_table(path: Path) -> str:
    parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path)
    return str(path)


@pytest.fixture
def prepared(redline: Any, tmp_path: Path) -> str:
    """The prefix of TEXTS, one document each, with a tokenizer of 300 entries trained on them."""
    source = write_lines(tmp_path / "a.jsonl")
    code, out, err = redline(f"data prepare {source} --output-prefix d/a --train-tokenizer 300 --workers 1")
    assert code == 0 and "train with: redline train --data-path d/a_text_document" in out, err
    return "d/a_text_document"


@pytest.fixture
def fit(redline: Any, tmp_path: Path) -> Any:
    """fit("name", "--flags ...") -> the small model's Run with these flags."""

    def call(name: str, flags: str) -> Run:
        code, out, err = redline(f"train {SMALL} {flags} --save {name}")
        assert code == 0, err
        return Run(tmp_path / name, out)

    return call


def part(run: Run, split: str) -> list[dict[str, Any]]:
    return [each for each in run.summary["data"] if each["split"] == split]


WRITERS = {
    "folder of text": lambda folder: write_text(folder / "texts"),
    "jsonl": lambda folder: write_lines(folder / "a.jsonl"),
    "jsonl.gz": lambda folder: write_lines(folder / "a.jsonl.gz"),
    "parquet": lambda folder: write_table(folder / "a.parquet"),
}


def test_a_run_is_predicted_again_with_the_vocabulary_that_its_data_brought(
    redline: Any, fit: Any, prepared: str
) -> None:
    """`memory --against` says what the run itself said, by its checkpoint, and by its parameters alone."""
    run = fit("run", f"--data-path {prepared} --split 90,10,0")
    for _ in "checkpoint", "parameters":
        code, text, _ = redline(f"memory --against {run.folder} --json")
        found = json.loads(text)
        assert code == 0 and found["model"]["vocab_size"] == 300
        assert found["memory"]["total"] == run.summary["predicted_memory"]["total"]
        assert found["against"]["parameters"] == found["parameters"]["total"]
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    code, text, _ = redline(f"memory --against {run.folder} --micro-batch-size 4 --json")
    found = json.loads(text)
    assert (found["micro_batch_size"], found["parameters"]["total"]) == (4, run.summary["parameters"])
    code, text, _ = redline(f"doctor {run.folder} --json")
    assert "vocab_size" not in [each["name"] for each in json.loads(text)["assumptions"]]


def test_every_format_gives_the_same_training(redline: Any, fit: Any, tmp_path: Path) -> None:
    """The tokenizer, its vocabulary size and its end token are found beside the data."""
    losses = []
    for number, (name, write) in enumerate(WRITERS.items()):
        source, prefix = write(tmp_path), f"d{number}/x"
        words = f"data prepare {source} --output-prefix {prefix} --train-tokenizer 300 --workers 1"
        assert redline(words)[0] == 0, name
        code, out, _ = redline(f"data inspect {prefix}_text_document --documents 1")
        assert code == 0 and "documents    120" in out and "120 sequences end with one" in out
        assert "the sum of 0 and 1 is 1, and so on\n<|endoftext|>" in out
        run = fit(f"run{number}", f"--data-path {prefix}_text_document --split 90,10,0 --eval-interval 3")
        losses.append((run.losses, run.valid_losses))
        assert (
            "validation loss at iteration 3" in run.output and "validation loss at iteration 6" in run.output
        )
        assert run.summary["valid_loss"] == run.valid_losses[-1] < math.log(300)
    assert all(each == losses[0] for each in losses)


def test_training_beats_the_first_guess(fit: Any, prepared: str) -> None:
    run = fit("run", f"--data-path {prepared} --split 9,1,0 --train-iters 60")
    assert run.losses[-1] < 0.7 * run.losses[0]
    assert run.summary["valid_loss"] < 0.8 * math.log(300)


def test_many_epochs_of_a_tiny_corpus(redline: Any, fit: Any, tmp_path: Path) -> None:
    """One document shorter than a sample, seen many times."""
    write_lines(tmp_path / "one.jsonl", ["short"])
    words = "data prepare one.jsonl --output-prefix d/one --tokenizer-type ByteTokenizer --workers 1"
    assert redline(words)[0] == 0
    for loader in ("single", "cyclic"):
        run = fit(loader, f"--data-path d/one_text_document --split 1,0,0 --dataloader-type {loader}")
        (train,) = part(run, "train")
        assert train["epochs"] == pytest.approx(6 * 4 * 16 / 6)
        assert "seen 64 times" in run.output
        assert run.losses[-1] < run.losses[0]


def test_splits_that_get_no_document_b096(redline: Any, fit: Any, tmp_path: Path) -> None:
    """B096: three documents run; which split is empty is said at the start and in the summary."""
    write_lines(tmp_path / "three.jsonl", TEXTS[:3])
    words = "data prepare three.jsonl --output-prefix d/three --tokenizer-type ByteTokenizer --workers 1"
    assert redline(words)[0] == 0
    run = fit("run", "--data-path d/three_text_document --split 98,1,1")
    start = run.output[: run.output.index("run folder")]
    for split in ("valid", "test"):
        says = f"d/three_text_document holds 3 documents, and this leaves none for the {split} split"
        assert f"{split} split: off: {says}; it is not evaluated." in start
        choice = next(each for each in run.summary["choices"] if each["what"] == f"{split} split")
        assert (choice["ran"], choice["asked"]) == ("off", "--split 98,1,1")
    assert run.valid_losses == [] and run.summary["valid_loss"] is None
    assert len(run.losses) == 6


def test_blend_with_weights(redline: Any, fit: Any, prepared: str, tmp_path: Path) -> None:
    """Shares and epochs of each source are said before the first step; weight 0 leaves a source out."""
    write_lines(tmp_path / "b.jsonl", [text.upper() for text in TEXTS])
    words = "data prepare b.jsonl --output-prefix d/b --tokenizer-model d/a_tokenizer.json --workers 1"
    assert redline(words)[0] == 0
    mixed = fit("mixed", f"--data-path 0.75 {prepared} 0.25 d/b_text_document --split 9,1,0")
    assert [(each["name"], each["weight"]) for each in part(mixed, "train")] == [
        (prepared, 0.75),
        ("d/b_text_document", 0.25),
    ]
    assert f"train data: {prepared}: " in mixed.output and "75.0% of the samples" in mixed.output
    alone = fit("alone", f"--data-path 1 {prepared} 0 d/b_text_document --split 9,1,0")
    assert "train data d/b_text_document: left out: its weight is 0." in alone.output
    assert [each["name"] for each in part(alone, "train")] == [prepared]
    assert alone.losses != mixed.losses


def test_data_of_two_tokenizers_is_not_mixed(redline: Any, prepared: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "b.jsonl")
    words = f"data prepare {source} --output-prefix d/b --tokenizer-type ByteTokenizer --workers 1"
    assert redline(words)[0] == 0
    code, _, err = redline(f"train {SMALL} --data-path {prepared} d/b_text_document --save run")
    assert code == 2 and "were made with different tokenizers" in err


def test_paths_of_each_split(redline: Any, fit: Any, prepared: str, tmp_path: Path) -> None:
    """Whole files for training, validation and test; the test split is evaluated at the end."""
    write_lines(tmp_path / "held.jsonl", TEXTS[:40])
    words = "data prepare held.jsonl --output-prefix d/held --tokenizer-model d/a_tokenizer.json --workers 1"
    assert redline(words)[0] == 0
    flags = f"--train-data-path {prepared} --valid-data-path d/held_text_document"
    run = fit("run", f"{flags} --test-data-path d/held_text_document")
    assert part(run, "train")[0]["name"] == prepared
    assert part(run, "valid")[0]["name"] == part(run, "test")[0]["name"] == "d/held_text_document"
    assert "test loss at iteration 6" in run.output
    assert run.summary["test_loss"] == pytest.approx(run.summary["valid_loss"], rel=0.2)
    alone = fit("alone", f"--train-data-path {prepared}")
    assert "valid split: off: no --valid-data-path is given" in alone.output
    assert alone.losses == run.losses


@pytest.mark.parametrize("flag", ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"])
def test_reset_flags_act(fit: Any, prepared: str, flag: str) -> None:
    """Each changes the training of documents shorter than a sample; the end token lies beside the data."""
    plain = fit("plain", f"--data-path {prepared} --split 9,1,0")
    reset = fit("reset", f"--data-path {prepared} --split 9,1,0 {flag}")
    assert plain.losses != reset.losses


def test_a_resumed_run_reads_on_in_the_data(fit: Any, prepared: str) -> None:
    """Over many epochs and with reset masks, a run cut in the middle continues with the very next samples."""
    flags = f"--data-path {prepared} --split 9,1,0 --reset-attention-mask --train-iters 12"
    whole = fit("whole", flags)
    fit("cut", f"{flags} --exit-interval 7")
    assert fit("cut", f"{flags} --load cut").losses == whole.losses


@pytest.mark.parametrize("named", ["--tokenizer-model d/a_tokenizer.json", "--vocab-size 512"])
def test_what_is_named_stands_over_what_lies_beside(fit: Any, prepared: str, named: str) -> None:
    run = fit("run", f"--data-path {prepared} --split 9,1,0 {named}")
    beside = fit("beside", f"--data-path {prepared} --split 9,1,0")
    same = "tokenizer" in named
    assert (run.losses == beside.losses) == same
    assert (run.summary["parameters"] == beside.summary["parameters"]) == same


def test_the_default_run_in_miniature(redline: Any, tmp_path: Path) -> None:
    """No data, model or folder named: corpus, tokenizer and unigram baseline are made, both losses said."""
    words = "--train-iters 2 --eval-iters 1 --micro-batch-size 1 --global-batch-size 2 --seq-length 64"
    code, out, err = redline(f"train {words} --device cpu --threads 1 --num-workers 0")
    assert code == 0, err
    assert "no data is named: training on the demo corpus" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("demo-")
    run = Run(folder, out)
    assert run.losses[0] == pytest.approx(math.log(4096), rel=0.05)
    unigram, valid = run.summary["unigram_loss"], run.summary["valid_loss"]
    assert 4 < unigram < math.log(4096) and valid == run.valid_losses[-1]
    said = " ".join(out.split())
    assert f"validation loss {valid:.4f}" in said and f"{unigram:.4f}" in said
    (corpus,) = part(run, "train")
    assert Path(corpus["name"]).is_relative_to(tmp_path / "cache") and corpus["weight"] == 1
    # The second run finds corpus and tokenizer.
    code, again, _ = redline(f"train {words} --device cpu --threads 1 --num-workers 0 --save again")
    assert code == 0 and "training a tokenizer" in out and "training a tokenizer" not in again
    assert Run(tmp_path / "again", again).losses == run.losses
