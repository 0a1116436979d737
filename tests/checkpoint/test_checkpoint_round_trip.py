"""What is saved comes back bit for bit, from any tensor into any tensor of the same name, shape and dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from redline.checkpoint import (
    find_latest,
    load_checkpoint,
    read_metadata,
    read_values,
    save_checkpoint,
    writer,
)

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> list[int]:
    """All bytes of a tensor: equal also where NaNs or the sign of zero would hide a change."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern at all, NaNs and infinities included (for bool: 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).view(shape)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=6
    ),
    transpose=st.booleans(),
)
def test_b104_every_bit_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[tuple[int, ...], torch.dtype]],
    transpose: bool,
) -> None:
    root = tmp_path_factory.mktemp("root")
    saved, loaded = {}, {}
    for index, (shape, dtype) in enumerate(shapes):
        tensor = random_bits(shape, dtype, index)
        saved[f"t.{index}"] = tensor.mT if transpose and tensor.dim() >= 2 else tensor
        loaded[f"t.{index}"] = torch.zeros(saved[f"t.{index}"].shape, dtype=dtype)
    values = {
        "step": 2**53 + 1,
        "loss": 0.1 + 0.2,
        "tiny": 5e-324,
        "nested": {"list": [None, True, "\u00e9"]},
    }
    save_checkpoint(root, 3, saved, values)
    assert load_checkpoint(root / "iter_0000003", loaded) == values
    assert {name: bits(t) for name, t in loaded.items()} == {name: bits(t) for name, t in saved.items()}


def test_views_of_a_flat_buffer_are_filled_in_place(tmp_path: Path) -> None:
    flat = torch.arange(40, dtype=torch.float32)
    tensors = {
        "q": flat[:12].view(3, 4),
        "k": flat[12:20].view(2, 4),
        "columns": flat[20:36].view(4, 4)[:, :3],
    }
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    save_checkpoint(tmp_path, 1, tensors, {})
    flat.fill_(-1)
    load_checkpoint(find_latest(tmp_path).folder, tensors)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert flat[36:].eq(-1).all() and flat[20:36].view(4, 4)[:, 3].eq(-1).all(), "wrote outside the views"


def test_a_parameter_that_requires_grad_is_saved_and_filled(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    expected = parameter.detach().clone()
    save_checkpoint(tmp_path, 1, {"w": parameter}, {})
    parameter.data.zero_()
    load_checkpoint(tmp_path / "iter_0000001", {"w": parameter})
    assert torch.equal(parameter, expected) and parameter.requires_grad and parameter.is_leaf


def test_names_that_share_memory_are_each_saved(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    tensors = {"a": weight, "b": weight, "rows": weight[1:3], "broadcast": weight[:1].expand(3, 4)}
    save_checkpoint(tmp_path, 1, tensors, {})
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load_checkpoint(tmp_path / "iter_0000001", loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_b059_save_at_step_0_and_without_optimizer_state(tmp_path: Path) -> None:
    weight = torch.randn(2)
    save_checkpoint(tmp_path, 0, {"w": weight}, {"iteration": 0})
    folder = find_latest(tmp_path).folder
    assert folder == tmp_path / "iter_0000000"
    loaded = {"w": torch.zeros(2)}
    assert load_checkpoint(folder, loaded) == read_values(folder) == {"iteration": 0}
    assert torch.equal(loaded["w"], weight)
    save_checkpoint(tmp_path, 1, {}, {})
    assert load_checkpoint(tmp_path / "iter_0000001", {}) == {}


def test_b041_a_checkpoint_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    def size(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    tensors, sizes, totals = {"w": torch.zeros(1000)}, [], []
    for iteration in range(100, 110):
        save_checkpoint(tmp_path, iteration, tensors, {"iteration": iteration}, keep=2)
        sizes.append(size(tmp_path / f"iter_{iteration:07d}"))
        totals.append(size(tmp_path))
    assert len(set(sizes)) == 1 and len(set(totals[1:])) == 1


def test_large_states_are_split_into_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 100)
    tensors = {f"t{n}": torch.randn(n) for n in (10, 20, 60, 5, 4)}  # bytes: 40, 80, 240, 20, 16
    save_checkpoint(tmp_path, 1, tensors, {})
    folder = tmp_path / "iter_0000001"
    by_file = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert sorted(by_file) == [f"rank_00000_{n}.safetensors" for n in range(4)]
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load_checkpoint(folder, loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_plain_safetensors_reads_it(tmp_path: Path) -> None:
    weight = torch.randn(3, 5).bfloat16()
    save_checkpoint(tmp_path, 12, {"final_norm.weight": weight}, {"iteration": 12})
    folder = tmp_path / (tmp_path / "latest").read_text().strip()
    entry = json.loads((folder / "metadata.json").read_text())["tensors"]["final_norm.weight"]
    assert entry["dtype"] == "bfloat16" and entry["shape"] == [3, 5]
    with safe_open(folder / entry["chunks"][0]["file"], framework="pt") as file:
        assert torch.equal(file.get_tensor("final_norm.weight"), weight)
    assert read_metadata(folder).state_dict_metadata["final_norm.weight"].size == weight.shape


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """A group that may read the folder may read every file in it (safetensors itself writes mode 0600)."""
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(2)}, {})
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "iter_0000001").iterdir()}
    assert len(modes) == 1


def test_no_warning_reaches_the_user(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(2)}, {})
    load_checkpoint(tmp_path / "iter_0000001", {"w": torch.zeros(2)})
    assert not list(recwarn)


def test_the_five_lines_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/checkpoints.md shows how to read a tensor without Redline; run exactly that."""
    weight = torch.randn(5)
    save_checkpoint(tmp_path / "runs/demo/checkpoints", 12, {"param/final_norm.weight": weight}, {})
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    code = page.split("## Reading one without Redline")[1].split("```python")[1].split("```")[0]
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    assert torch.equal(names["weight"], weight)
