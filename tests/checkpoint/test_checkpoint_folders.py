"""Which checkpoint is the latest, which ones stay, and what a cut save leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.checkpoint import (
    find_iteration,
    find_latest,
    folders,
    list_checkpoints,
    read_values,
    save_checkpoint,
)
from redline.checkpoint.folders import folder_name
from redline.errors import CheckpointError


def save(root: Path, iteration: int, keep: int | None = None, keep_every: int | None = None) -> Path:
    tensors = {"w": torch.full((8,), float(iteration))}
    report = save_checkpoint(root, iteration, tensors, {"n": iteration}, keep=keep, keep_every=keep_every)
    assert report.folder.is_dir()
    return report.folder


def iterations(root: Path) -> list[int]:
    return [read_values(folder)["n"] for folder in list_checkpoints(root)]


def test_an_empty_or_missing_root_holds_nothing(tmp_path: Path) -> None:
    assert find_latest(tmp_path).folder is None and find_latest(tmp_path / "missing").folder is None
    assert list_checkpoints(tmp_path / "missing") == []


def test_latest_is_obeyed(tmp_path: Path) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    assert find_latest(tmp_path) == find_latest(tmp_path, verify=True)
    assert find_latest(tmp_path).folder == second and not find_latest(tmp_path).notices
    (tmp_path / "latest").write_text("iter_0000010\n")
    found = find_latest(tmp_path)
    assert found.folder == first and "iter_0000020 is newer" in found.notices[0]
    assert find_latest(second).folder == second, "a checkpoint's own folder"
    assert find_iteration(tmp_path, 20) == second
    with pytest.raises(CheckpointError, match="iterations there: 10, 20"):
        find_iteration(tmp_path, 15)


def test_b100_fall_back_to_the_newest_complete_one(tmp_path: Path) -> None:
    first, second, third = save(tmp_path, 10), save(tmp_path, 20), save(tmp_path, 30)
    shard = third / "rank_00000_0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert find_latest(tmp_path).folder == third, "a flipped bit shows only in the checksum"
    found = find_latest(tmp_path, verify=True)
    assert found.folder == second and str(shard) in found.notices[0] and "checksum" in found.notices[0]
    shard.write_bytes(content[:-1])
    found = find_latest(tmp_path)
    assert found.folder == second and f"using {second}" in found.notices[0]
    assert iterations(tmp_path) == [10, 20]
    (second / "values.json").unlink()
    assert find_latest(tmp_path).folder == first
    (first / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no complete checkpoint") as error:
        find_latest(tmp_path)
    assert all(name in str(error.value) for name in (shard.name, "values.json", "manifest.json"))


def test_a_damaged_latest_falls_back_below_itself_before_above(tmp_path: Path) -> None:
    """8 and 10 are of the run that was rolled back to 6, and 7 is of the one that went on."""
    for iteration in (6, 8, 10, 7):
        save(tmp_path, iteration)
    sixth, seventh, eighth, tenth = (tmp_path / folder_name(iteration) for iteration in (6, 7, 8, 10))
    (seventh / "values.json").unlink()
    found = find_latest(tmp_path)
    assert found.folder == sixth and f"{tenth} is newer" in found.notices[0]
    (sixth / "values.json").unlink()
    found = find_latest(tmp_path)
    assert found.folder == tenth and "last resort" in found.notices[0] and str(sixth) in found.notices[0]
    (tenth / "values.json").unlink()
    assert find_latest(tmp_path).folder == eighth


def test_a_missing_latest_falls_back_below_itself_too(tmp_path: Path) -> None:
    for iteration in (6, 10):
        save(tmp_path, iteration)
    (tmp_path / "latest").write_text("iter_0000007\n")
    found = find_latest(tmp_path)
    assert found.folder == tmp_path / "iter_0000006" and "iter_0000007, which is missing" in found.notices[0]


def test_what_is_wrong_with_a_manifest_is_one_sentence(tmp_path: Path) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    (second / "manifest.json").unlink()
    (notice,) = find_latest(tmp_path).notices
    assert notice == (
        f"cannot read {second}/manifest.json: No such file or directory; "
        f"using {first}, the newest complete checkpoint."
    )
    (second / "manifest.json").write_text("{")
    (notice,) = find_latest(tmp_path).notices
    assert notice.startswith(f"{second}/manifest.json is damaged: it is not whole JSON (")


def test_latest_that_is_missing_or_names_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    for content, reason in (
        ("iter_0000099\n", "iter_0000099, which is missing"),
        ("\xff..", "no checkpoint"),
    ):
        (tmp_path / "latest").write_text(content, encoding="latin-1")
        found = find_latest(tmp_path)
        assert found.folder == folder and reason in found.notices[0]
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path).folder == folder


def test_b100_a_cut_save_is_ignored_named_and_then_removed(tmp_path: Path) -> None:
    folder, cut = save(tmp_path, 10), tmp_path / "iter_0000020.partial"
    cut.mkdir()
    (cut / "rank_00000_0.safetensors").write_bytes(b"half")
    found = find_latest(tmp_path)
    assert found.folder == folder and str(cut) in found.notices[0] and "did not finish" in found.notices[0]
    assert iterations(tmp_path) == [10]
    save(tmp_path, 30)
    assert not cut.exists() and not find_latest(tmp_path).notices


def test_b100_a_first_save_that_was_cut_leaves_nothing_to_resume(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010.partial").mkdir()
    found = find_latest(tmp_path)
    assert found.folder is None and "iter_0000010.partial" in found.notices[0]


def test_an_iteration_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    tensors = {"w": torch.zeros(8)}
    save_checkpoint(tmp_path, 10, tensors, {"n": "again"}, keep=1)
    assert iterations(tmp_path) == ["again"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest"]


def test_b100_killed_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    replaced = folder.rename(tmp_path / "iter_0000010.replaced")
    assert find_latest(tmp_path).folder == replaced and iterations(tmp_path) == [10]
    save(tmp_path, 20, keep=2)
    assert iterations(tmp_path) == [10, 20], "it still counts"
    save(tmp_path, 10)
    assert not replaced.exists() and iterations(tmp_path) == [10, 20]


def test_b100_killed_while_an_old_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal starts with a rename, so half a checkpoint never has a checkpoint's name."""
    save(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", lambda folder, **_: (folder / "values.json").unlink())
        save(tmp_path, 20, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000010.partial", "iter_0000020", "latest",
    ]  # fmt: skip
    assert iterations(tmp_path) == [20]
    save(tmp_path, 30)
    assert not (tmp_path / "iter_0000010.partial").exists()


def test_strangers_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.partial", "iter_12", "iter_0000001x", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000005").write_text("a file, no folder")
    save(tmp_path, 10, keep=1)
    save(tmp_path, 20, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.partial", "iter_12", "iter_0000001x", "config", "iter_0000005", "iter_0000020", "latest",
    }  # fmt: skip


@settings(max_examples=10, derandomize=True, deadline=None)
@given(
    order=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    keep=st.integers(1, 3) | st.none(),
    keep_every=st.sampled_from([None, 4]),
)
def test_retention(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], keep: int | None, keep_every: int | None
) -> None:
    """After each save, also after a roll-back: the newest `keep` up to it, the multiples, the later ones."""
    root = tmp_path_factory.mktemp("root")
    there: set[int] = set()
    for iteration in order:
        save(root, iteration, keep, keep_every)
        older = sorted((n for n in there if n < iteration), reverse=True)
        gone = older[keep - 1 :] if keep else []
        there = {n for n in there | {iteration} if n not in gone or (keep_every and n % keep_every == 0)}
        assert iterations(root) == sorted(there)
        assert (root / "latest").read_text().strip() == folder_name(iteration)
