"""A checkpoint that does not fit, is damaged or hostile: one error that names it, and nothing is touched."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.checkpoint import (
    ABSENT,
    AsyncWriter,
    compare_values,
    find_latest,
    load_checkpoint,
    read_values,
    save_checkpoint,
)
from redline.checkpoint.manifest import read_manifest, sum_file, write_manifest
from redline.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"a": torch.ones(4, 3), "b": torch.ones(5), "optimizer.m": torch.ones(2)}
    save_checkpoint(tmp_path, 7, tensors, {"iteration": 7})
    return tmp_path / "iter_0000007"


def wanted(**changes: Any) -> dict[str, torch.Tensor]:
    """The tensors of `saved`, zeroed; a change of None takes a name out."""
    tensors = {"a": torch.zeros(4, 3), "b": torch.zeros(5), "optimizer.m": torch.zeros(2), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def refused(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> str:
    """The text of the error; asserts that no tensor was touched."""
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, tensors, **options)
    assert not any(tensor.any() for tensor in tensors.values()), "loaded half"
    return str(error.value)


def test_w07_missing_and_unexpected_tensors_are_named(saved: Path) -> None:
    text = refused(saved, wanted(b=None, c=torch.zeros(1), d=torch.zeros(1)))
    assert "lacks: c, d" in text and "no place for: b" in text and str(saved) in text
    many = {f"n{i:02d}": torch.zeros(1) for i in range(30)}
    assert "n00, n01, n02, n03, n04 and 25 more" in refused(saved, wanted(**many))


def test_another_shape_is_refused(saved: Path) -> None:
    assert "a ([4, 3] saved, [3, 4] wanted)" in refused(saved, wanted(a=torch.zeros(3, 4)))
    assert "b ([5] saved, [5, 1] wanted)" in refused(saved, wanted(b=torch.zeros(5, 1)))


def test_saved_tensors_may_stay_unread_only_by_name(saved: Path) -> None:
    model = wanted(**{"optimizer.m": None})
    assert "optimizer.m" in refused(saved, model)
    assert "optimizer.m" in refused(saved, model, leave=["optimizer"])
    load_checkpoint(saved, model, leave=["optimizer.*"])
    assert model["a"].eq(1).all()


def test_a_dtype_is_only_widened_unless_rounding_is_allowed(tmp_path: Path) -> None:
    third = torch.tensor([1 / 3, float("nan")])
    save_checkpoint(tmp_path, 1, {"w": third, "h": third.bfloat16(), "n": torch.tensor([3])}, {})
    folder = tmp_path / "iter_0000001"
    exact = {"w": torch.zeros(2).double(), "h": torch.zeros(2), "n": torch.zeros(1, dtype=torch.int64)}
    load_checkpoint(folder, exact)
    assert exact["w"][0] == third[0].double() and exact["h"][0] == third.bfloat16()[0]
    rounded = {**exact, "w": torch.zeros(2).bfloat16()}
    with pytest.raises(CheckpointError, match=r"w \(torch.float32 saved, torch.bfloat16 wanted\)"):
        load_checkpoint(folder, rounded)
    load_checkpoint(folder, rounded, allow_rounding=True)
    assert rounded["w"][0] == third.bfloat16()[0]
    with pytest.raises(CheckpointError, match="dtypes differ: h"):
        load_checkpoint(folder, {**exact, "h": torch.zeros(2, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match="dtypes differ: h"):
        load_checkpoint(folder, {**exact, "h": torch.zeros(2, dtype=torch.int64)}, allow_rounding=True)
    with pytest.raises(CheckpointError, match="dtypes differ: n"):
        load_checkpoint(folder, {**exact, "n": torch.zeros(1)}, allow_rounding=True)


@pytest.mark.parametrize(
    "name", ["rank_00000_0.safetensors", "metadata.json", "values.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "empty"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_file_is_named_before_anything_is_loaded(
    saved: Path, name: str, damage: str, verify: bool
) -> None:
    path = saved / name
    content = bytearray(path.read_bytes())
    middle = len(content) - 2 if name.endswith("safetensors") else len(content) // 2
    content[middle] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes({"flip": content, "cut": content[:-1], "empty": b""}[damage])
    if damage == "flip" and name.endswith("safetensors") and not verify:
        load_checkpoint(saved, wanted(), verify=False)  # a wrong value is what only the checksum can see
        return
    assert name in refused(saved, wanted(), verify=verify) or (name, damage) == ("manifest.json", "flip")
    if not name.startswith("rank"):
        with pytest.raises(CheckpointError):
            read_values(saved) if name != "metadata.json" else load_checkpoint(saved, wanted())


def test_every_flipped_bit_of_a_small_checkpoint_is_found(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"w": torch.ones(3)}, {"n": 1})
    folder = tmp_path / "iter_0000001"
    for path in folder.iterdir():
        content = path.read_bytes()
        for position in range(0, len(content), 3):
            spoilt = bytearray(content)
            spoilt[position] ^= 0x10
            path.write_bytes(spoilt)
            loaded = {"w": torch.zeros(3)}
            try:
                assert load_checkpoint(folder, loaded) == {"n": 1} and loaded["w"].eq(1).all()
            except CheckpointError:
                assert not loaded["w"].any()
            else:  # harmless only in the manifest: its own iteration number or its whitespace
                assert path.name == "manifest.json", (path.name, position)
        path.write_bytes(content)


def test_a_file_that_contradicts_the_metadata_is_refused(saved: Path) -> None:
    """Checksums agree (somebody rebuilt the manifest), the shape in the safetensors header does not."""
    from safetensors.torch import save_file

    path = saved / "rank_00000_0.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5), "optimizer.m": torch.ones(2)}, path)
    reseal(saved)
    assert "a in " in refused(saved, wanted()) and path.name in refused(saved, wanted())


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": []},
        {"dtype": "complex32"},
        {"shape": [4, 4]},
        {"chunks": [{"offsets": [0, 0], "sizes": [4, 3], "file": "../secret", "key": "a"}]},
        {"chunks": [{"offsets": [1, 0], "sizes": [4, 3], "file": "rank_00000_0.safetensors", "key": "a"}]},
    ],
)
def test_nonsense_in_the_metadata_is_refused(saved: Path, change: dict[str, Any]) -> None:
    document = json.loads((saved / "metadata.json").read_text())
    document["tensors"]["a"].update(change)
    (saved / "metadata.json").write_text(json.dumps(document))
    reseal(saved)
    refused(saved, wanted())


def reseal(folder: Path) -> None:
    """Give a changed folder a manifest that agrees with it."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    write_manifest(folder, 7, {name: sum_file(folder / name) for name in names})


def test_a_manifest_cannot_name_files_outside(saved: Path) -> None:
    files = read_manifest(saved)
    write_manifest(saved, 7, {**files, "../latest": sum_file(saved.parent / "latest")})
    assert "outside the folder" in refused(saved, wanted())


def test_a_newer_format_says_so(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    assert "format 99" in refused(saved, wanted())


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "manifest.json" in refused(tmp_path, wanted())
    assert "nowhere" in refused(tmp_path / "nowhere", wanted())


class Bomb:
    """A pickle of this writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.marker, "executed"))


def test_a_planted_pickle_is_never_executed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 4: DCP's own reader would unpickle `.metadata` (and bytes) and so run whatever it holds."""
    marker = saved.parent / "marker"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.read_text() == "executed", "the bomb must work for the test to mean anything"
    marker.unlink()
    for name in (".metadata", "__0_0.distcp", ".rank0.metadata", "rank_00000_0.pt"):
        (saved / name).write_bytes(bomb)
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(torch, "save", None)
    tensors = wanted()
    assert load_checkpoint(find_latest(saved.parent, verify=True).folder, tensors) == {"iteration": 7}
    assert tensors["a"].eq(1).all()
    for name in ("metadata.json", "values.json"):  # in place of a file that is read
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(bomb)
        reseal(saved)
        assert name in refused(saved, wanted())
        (saved / name).write_bytes(content)
    (saved / "manifest.json").write_bytes(bomb)
    assert "manifest.json" in refused(saved, wanted())
    save_checkpoint(saved.parent, 8, tensors, {"iteration": 8})
    assert not marker.exists()


@pytest.mark.parametrize("background", [False, True])
def test_bytes_and_objects_are_refused_not_pickled(tmp_path: Path, background: bool) -> None:
    for junk in (pickle.dumps(1), {"nested": torch.ones(1)}, 3, "text", None):
        with AsyncWriter() as writer, pytest.raises(CheckpointError, match="junk is no tensor"):
            tensors: Any = {"a": torch.ones(1), "junk": junk}
            save_checkpoint(tmp_path, 1, tensors, {}, writer=writer if background else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"loss": float("nan")}, "values.loss"),
        ({"a": {"b": [1, float("inf")]}}, "values.a.b[1]"),
        ({"a": torch.ones(1)}, "values.a"),
        ({"a": (1, 2)}, "values.a"),
        ({"a": b"x"}, "values.a"),
        ({"a": {1: 2}}, "values.a"),
        ({1: 2}, "values"),
    ],
)
def test_values_that_json_would_change_are_refused(tmp_path: Path, values: Any, name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path / "root", 1, {}, values)
    assert f"{name} cannot be saved" in error.value.what
    assert not (tmp_path / "root").exists()


def test_w14_differences_are_listed_field_by_field() -> None:
    saved = {"model": {"layers": 2, "hidden": 8, "old": None}, "lr": 0.1, "data": ["a"]}
    now = {"model": {"layers": 4, "hidden": 8, "new": 1}, "lr": 0.1, "data": ["a", "b"]}
    differences = compare_values(saved, now)
    assert [(d.name, d.saved, d.wanted) for d in differences] == [
        ("model.layers", 2, 4),
        ("model.old", None, ABSENT),
        ("model.new", ABSENT, 1),
        ("data", ["a"], ["a", "b"]),
    ]
    assert str(differences[0]) == "model.layers: 2 in the checkpoint, 4 now"
    assert str(differences[2]) == "model.new: absent in the checkpoint, 1 now"
    (rounded,) = compare_values({"warmup": 2.4000000000000004}, {"warmup": 2.8000000000000003})
    assert str(rounded) == "warmup: 2.4 in the checkpoint, 2.8 now"
    (close,) = compare_values({"lr": 0.1}, {"lr": 0.1000000001})
    assert str(close) == "lr: 0.1 in the checkpoint, 0.1000000001 now"
    assert compare_values(now, now) == []
