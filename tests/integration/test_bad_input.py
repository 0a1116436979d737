"""Bad input: one paragraph that says what, why and how to mend it; exit code 2 for usage and 1 for failure.

No traceback; and whatever existed before is as it was, also for the next try.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.cli.main import main
from redline.data import IndexedWriter
from redline.run.folder import open_folder

from .conftest import TINY, Refused, Run

MODEL = (
    TINY.replace("--mock-data ", "")
    .replace("--vocab-size 101 ", "")
    .replace("--train-iters 6", "--train-iters 3")
)


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The prefix d/pair: 40 documents of 12 tokens below 101."""
    return write_pair(tmp_path / "d" / "pair", [[(3 * k + i) % 101 for i in range(12)] for k in range(40)])


# The command line.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian", ["no command 'trian'", "did you mean `redline train`?"]),
        ("--preset llama3-8b", ["did you mean `redline train --preset llama3-8b`?"]),
        ("train --hiden-size 64", ["no flag --hiden-size", "did you mean --hidden-size?"]),
        ("train --foo", ["no flag --foo", "--help-all lists every flag"]),
        ("train 12", ["the word '12' belongs to no flag"]),
        ("train --train-iters", ["--train-iters needs 1 value"]),
        ("train --train-iters 0", ["--train-iters 0: the value must be at least 1"]),
        ("train --lr nan", ["--lr nan: the value must be finite"]),
        (
            "train --global-batch-size 7 --micro-batch-size 2",
            ["no multiple of", "use --global-batch-size 6 or 8"],
        ),
        ("train --preset lama3-8b --mock-data", ["no such preset", "did you mean llama3-8b?"]),
        ("train --preset llama3-8b --train-iters 1", ["no training data is named", "--mock-data"]),
        ("train --mock-data --data-path x --train-iters 1", ["exclude each other"]),
        ("train missing.toml", ["cannot read the config file missing.toml", "No such file"]),
        ("data prepaer", ["no verb 'prepaer'", "did you mean `redline data prepare`?"]),
        ("data prepare a.txt --output-prefix x --tokenizer-typ B", ["did you mean --tokenizer-type?"]),
        ("bench stpe", ["did you mean `redline bench step`?"]),
        ("memory --preset llama3-8b --gpu h1000", ["no data sheet of that device"]),
    ],
)
def test_usage(refused: Refused, words: str, says: list[str]) -> None:
    refused(words, 2, *says)


def test_everything_wrong_is_said_at_once(refused: Refused) -> None:
    """W08: also what only together is impossible, and before anything is opened."""
    err = refused(
        "train --nun-layers 3 --train-iters x --global-batch-size 7 --micro-batch-size 2 --bf16 --fp16 "
        "--pipeline-model-parallel-size 2",
        2,
        "did you mean --num-layers?",
        "--train-iters x: the value must be a whole number",
        "--bf16 and --fp16 exclude each other",
        "--global-batch-size 7 is no multiple of --micro-batch-size 2",
        "--pipeline-model-parallel-size 2 is not available yet",
    )
    assert err.count("ConfigError: ") == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nnum_layer = 2\n", ["no key model.num_layer", "did you mean num_layers?"]),
        ("[trian]\nseq_length = 4\n", ["no section [trian]", "did you mean train?"]),
        ("[train]\nlr = 1.0\n", ["lr stands in [train]", "move it to [optim]"]),
        ("[train]\nmicro_batch_size = 'two'\n", ['micro_batch_size = "two": the value must be a whole']),
        ("x = = 3", ["c.toml is not a TOML file", "line 1"]),
        ("# \xff", ["c.toml is not a TOML file"]),
    ],
)
def test_config_file(refused: Refused, tmp_path: Path, text: str, says: list[str]) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode("latin-1"))
    refused("train c.toml", 2, *says)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WORLD_SIZE", "2", "WORLD_SIZE=2 is set, but MASTER_ADDR is not"),
        ("WORLD_SIZE", "two", "the environment variable WORLD_SIZE is 'two'"),
        ("OMP_NUM_THREADS", "0", "the environment variable OMP_NUM_THREADS is '0'"),
    ],
)
def test_environment(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    refused(f"train {TINY}", 2, says)


def test_a_gpu_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(f"train {TINY} --device cuda", 2, "--device cuda: PyTorch finds no GPU here")


# Token files.


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], list[str]]] = {
    "no .bin": (lambda b, i: b.unlink(), ["there is no file", "pair.bin"]),
    "no .idx": (lambda b, i: i.unlink(), ["there is no file", "pair.idx"]),
    ".bin cut short": (lambda b, i: cut(b, 10), ["holds 950 bytes, but its index describes 960"]),
    ".bin too long": (
        lambda b, i: b.write_bytes(b.read_bytes() + b"\0\0"),
        ["holds 962 bytes", "describes 960"],
    ),
    ".idx cut short": (lambda b, i: cut(i, 3), ["pair.idx is not a whole Megatron index", "cut short"]),
    ".idx without its header": (lambda b, i: i.write_bytes(i.read_bytes()[:20]), ["holds 20 bytes"]),
    ".idx empty": (lambda b, i: i.write_bytes(b""), ["holds 0 bytes"]),
    "another file as .idx": (lambda b, i: i.write_bytes(b"x" * 2000), ["an index begins with b'MMIDIDX"]),
    ".bin a folder": (lambda b, i: (b.unlink(), b.mkdir()), ["there is no file"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_token_files(refused: Refused, pair: Path, name: str) -> None:
    damage, says = DAMAGE[name]
    damage(pair.with_name("pair.bin"), pair.with_name("pair.idx"))
    refused(f"train {MODEL} --vocab-size 101 --data-path {pair} --save run", 1, *says)


def test_a_prefix_that_was_cut_off_is_completed(refused: Refused, pair: Path) -> None:
    refused(f"train {MODEL} --data-path {pair.parent / 'pa'} --save run", 1, f"did you mean {pair}?")
    refused(f"train {MODEL} --data-path {pair.parent} --save run", 1, f"did you mean {pair}?")
    refused(f"train {MODEL} --data-path 0.5 {pair} 0.5 --save run", 1, "weights and prefixes alternate")


@pytest.mark.parametrize(
    ("documents", "dtype", "says"),
    [
        ([], "<u2", ["the train split is empty", "holds 0 documents, without a token"]),
        ([[], []], "<u2", ["the train split is empty", "holds 2 documents, without a token"]),
        ([[1.0, 2.5]] * 4, "<f4", ["holds float32 numbers", "token ids are whole numbers"]),
    ],
)
def test_no_tokens_to_train_on(
    refused: Refused, tmp_path: Path, documents: list[Any], dtype: str, says: list[str]
) -> None:
    prefix = write_pair(tmp_path / "d" / "bad", documents, dtype)
    refused(f"train {MODEL} --vocab-size 101 --data-path {prefix} --save run", 1, *says)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [999, -5])
def test_token_ids_beyond_the_vocabulary(
    refused: Refused, redline: Any, tmp_path: Path, pair: Path, workers: int, bad: int
) -> None:
    """Named by file, document and id. The folder of the failed start can be used for the next one."""
    prefix = write_pair(tmp_path / "d" / "bad", [[1, 2, bad, 3]], "<i4")
    words = f"train {MODEL} --vocab-size 101 --split 1,0,0 --num-workers {workers} --save run --data-path"
    says = f"bad.bin, document 0: token id {bad} is outside the vocabulary", "ids run from 0 to 100"
    refused(f"{words} {prefix}", 1, *says, changes=True)
    assert redline(f"{words} {pair}")[0] == 0


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--split abc", 2, '--split "abc" is no split'),
        ("--split 0,1,1", 1, "the train split is empty"),
        ("", 2, "the size of the vocabulary is not known"),
        ("--tokenizer-type NullTokenizer", 2, "NullTokenizer needs --vocab-size"),
        ("--vocab-size 101 --reset-position-ids", 2, "no end-of-document token is known"),
        ("--vocab-size 101 --eod-token x", 2, "--eod-token x: there is no tokenizer that could have it"),
        ("--tokenizer-model no.json", 1, "there is no tokenizer file no.json"),
        (
            "--tokenizer-type ByteTokenizer --vocab-size 101",
            2,
            "smaller than the tokenizer's vocabulary, 257",
        ),
    ],
)
def test_options_that_do_not_fit_the_data(
    refused: Refused, pair: Path, flags: str, code: int, says: str
) -> None:
    flags = flags if "--split 0" not in flags else f"{flags} --vocab-size 101"
    refused(f"train {MODEL} {flags} --data-path {pair} --save run", code, says)


def test_a_tokenizer_that_was_moved(refused: Refused, redline: Any, tmp_path: Path) -> None:
    """Moved with the data it is found; without it the note that names it is."""
    (tmp_path / "a.txt").write_text("some words " * 60)
    assert redline("data prepare a.txt --output-prefix d/x --train-tokenizer 280 --workers 1")[0] == 0
    (tmp_path / "d").rename(tmp_path / "e")
    words = f"train {MODEL} --data-path e/x_text_document --split 1,0,0 --save"
    assert redline(f"{words} run")[0] == 0
    (tmp_path / "e" / "x_tokenizer.json").unlink()
    refused(f"{words} run2", 1, "e/x_text_document.json names the tokenizer file", "--tokenizer-model")


# Checkpoints.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        words = f"train {MODEL} --vocab-size 101 --mock-data --save-interval 1 --keep-checkpoints 9"
        assert main([*words.split(), "--save", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run as ./run."""
    return shutil.copytree(finished, tmp_path / "run")


def newest(run: Path, pattern: str) -> Path:
    return next((run / "checkpoints" / "iter_0000003").glob(pattern))


def flip_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


RESUME = f"train {MODEL} --vocab-size 101 --mock-data --train-iters 4 --load run --save run"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            f"{RESUME} --hidden-size 64",
            ["a checkpoint of another model", "hidden: 32 in the checkpoint, 64 now"],
        ),
        (f"{RESUME} --ckpt-step 7", ["no checkpoint of iteration 7", "iterations there: 1, 2, 3"]),
        (
            RESUME.replace("--load run", "--load rnu").replace("--save run", "--save new"),
            ["--load rnu is not a folder"],
        ),
        (f"{RESUME} --load run/config.toml --save new", ["--load run/config.toml is not a folder"]),
        (f"{RESUME} --load . --exit-on-missing-checkpoint --save new", ["--load . holds no checkpoint"]),
    ],
)
def test_no_such_checkpoint(refused: Refused, copied: Path, words: str, says: list[str]) -> None:
    refused(words, 1, *says)


def test_a_flipped_byte(refused: Refused, redline: Any, copied: Path) -> None:
    """Sizes agree, so only the checksum tells; an older checkpoint still loads."""
    flip_last_byte(newest(copied, "*.safetensors"))
    refused(RESUME, 1, "iter_0000003 is damaged", "has checksum", "--ckpt-step")
    code, out, err = redline(f"{RESUME} --ckpt-step 2")
    assert code == 0 and "step 2, 8 samples consumed" in out, err


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file cut short": (lambda run: cut(newest(run, "*.safetensors"), 100), "iter_0000002"),
    "no values.json": (lambda run: newest(run, "values.json").unlink(), "iter_0000002"),
    "no manifest.json": (lambda run: newest(run, "manifest.json").unlink(), "iter_0000002"),
    "values.json cut short": (lambda run: cut(newest(run, "values.json"), 5), "iter_0000002"),
    "latest names nothing": (
        lambda run: (run / "checkpoints/latest").write_text("iter_0000099\n"),
        "iter_0000003",
    ),
    "latest is garbage": (lambda run: (run / "checkpoints/latest").write_bytes(b"\xff\x00"), "iter_0000003"),
}


@pytest.mark.parametrize("name", BREAK)
def test_the_newest_whole_checkpoint_is_used_and_said(redline: Any, copied: Path, name: str) -> None:
    """B100: resuming falls back to what is whole, and says what it passed over."""
    damage, loaded = BREAK[name]
    damage(copied)
    code, out, err = redline(RESUME)
    assert code == 0, err
    assert f"using run/checkpoints/{loaded}, the newest complete checkpoint" in out
    assert [record["step"] for record in Run(copied, out).records()] == [1, 2, 3, 4]


def test_no_whole_checkpoint_at_all(refused: Refused, copied: Path) -> None:
    for path in (copied / "checkpoints").glob("iter_*"):
        (path / "values.json").unlink()
    refused(RESUME, 1, "holds no complete checkpoint", "iter_0000001")


# The run folder.

START = f"train {MODEL} --vocab-size 101 --mock-data"


@pytest.mark.parametrize(
    ("save", "code", "says"),
    [
        ("run", 2, ["run already holds a run", "--load run --save run"]),
        ("run/config.toml", 2, ["run/config.toml is a file"]),
        (
            "run/config.toml/new",
            1,
            ["cannot create the run folder", "a file stands where a folder is needed"],
        ),
        ("/proc/nowhere/run", 1, ["cannot create the run folder /proc/nowhere/run"]),
    ],
)
def test_where_a_run_cannot_go(refused: Refused, copied: Path, save: str, code: int, says: list[str]) -> None:
    refused(f"{START} --save {save}", code, *says)


def test_another_runs_folder_is_not_entered_by_loading(
    refused: Refused, copied: Path, finished: Path
) -> None:
    """A run that was loaded from elsewhere would replace checkpoints of the one that lies there."""
    refused(f"{START} --train-iters 5 --load {finished} --save run", 2, "run already holds a run")


def test_foreign_files_are_not_replaced(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine = 1\n")
    refused(f"{START} --save .", 2, "--save . holds a config.toml that is not of a run")


def test_the_same_folder_in_other_words_resumes(redline: Any, copied: Path) -> None:
    code, out, err = redline(f"{START} --train-iters 4 --load ./run/ --save {copied}")
    assert code == 0 and "step 3, 12 samples consumed" in out, err


def test_a_run_without_a_checkpoint_begins_again_by_the_command_that_resumes(
    redline: Any, copied: Path
) -> None:
    """Killed before its first checkpoint: what the error proposes works."""
    shutil.rmtree(copied / "checkpoints")
    code, _, err = redline(f"{START} --save run")
    assert code == 2 and "`--load run --save run`" in err
    code, out, err = redline(f"{START} --load run --save run")
    assert code == 0 and "starting at step 0" in out, err
    assert [record["step"] for record in Run(copied, out).records()] == [1, 2, 3]


def test_a_folder_where_a_run_is_going_on(refused: Refused, copied: Path) -> None:
    """Two resumed at once would overwrite each other's checkpoints."""
    with open_folder(copied, goes_on=True):
        refused(RESUME, 2, "--save run is in use", "wait for it or end it")


def test_two_unnamed_runs_in_one_second(redline: Any, tmp_path: Path) -> None:
    for _ in range(2):
        code, _, err = redline(START)
        assert code == 0, err
    assert len(list((tmp_path / "runs").iterdir())) == 2


# A full disk.


class FullFile(io.FileIO):
    """A file on a disk that is full once `room` lines are written."""

    room = 2

    def write(self, data: Any) -> int:
        FullFile.room -= 1
        if FullFile.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_full_disk_while_metrics_are_written(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("redline.ledger.metrics.FileIO", FullFile)
    says = "run/metrics.jsonl: No space left on device", "free space"
    refused(f"{START} --save run --save-interval 1", 1, *says, changes=True)
    assert len(Run(tmp_path / "run", "").records()) == 2
    assert (tmp_path / "run" / "checkpoints" / "iter_0000002").is_dir()


def test_full_disk_while_the_configuration_is_written(
    refused: Refused, redline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folder is good for the next try."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("redline.run.spine.write_text_atomic", full)
        refused(f"{START} --save run", 1, "cannot write run/config.toml: No space left", changes=True)
    assert redline(f"{START} --save run")[0] == 0


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within, the system refuses to let a file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("mode", ["--async-save", "--no-async-save"])
def test_a_checkpoint_that_does_not_fit(
    refused: Refused, redline: Any, copied: Path, pair: Path, mode: str
) -> None:
    """The older checkpoints stay, nothing half-written does, and the run goes on from them."""
    before = sorted(path.name for path in (copied / "checkpoints").iterdir())
    with largest_file(200_000):  # more than anything else of the run, less than its tensors
        words = f"{RESUME} {mode}".replace("--mock-data", f"--data-path {pair}")
        refused(words, 1, "iter_0000004.partial", "cannot write", changes=True)
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == before
    code, out, err = redline(RESUME)
    assert code == 0 and "step 3, 12 samples consumed" in out, err


@pytest.mark.parametrize("flag", ["", "--data-cache-path /proc/nowhere"])
def test_a_cache_that_cannot_be_written(
    redline: Any, refused: Refused, monkeypatch: pytest.MonkeyPatch, pair: Path, flag: str
) -> None:
    """The user's own cache is a help that can be done without; a folder that was asked for is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    words = f"train {MODEL} --vocab-size 101 --data-path {pair} --save run {flag}"
    if flag:
        refused(words, 1, "--data-cache-path", "/proc/nowhere")
        return
    code, out, err = redline(words)
    assert code == 0 and "sample indices are not kept: /proc/nowhere/redline/indices" in out, err
    refused("train --train-iters 1 --device cpu", 1, "the demo corpus cannot be kept", "XDG_CACHE_HOME")
