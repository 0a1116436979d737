"""Background saves: the snapshot is complete on return, one save at a time, errors come out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from redline.checkpoint import AsyncWriter, find_latest, load_checkpoint, save_checkpoint
from redline.checkpoint import writer as writer_module
from redline.errors import CheckpointError, TrainingError


class Gate:
    """Holds the writing thread between the snapshot and the disk until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.calls = threading.Event(), threading.Event(), 0
        self._save_file = writer_module.save_file
        monkeypatch.setattr(writer_module, "save_file", self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        self.reached.set()
        assert self.open.wait(30)
        self._save_file(*args, **kwargs)


def test_state_may_change_once_the_call_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    flat = torch.arange(64.0)
    tensors = {"matrix": flat[:48].view(6, 8).T, "rest": flat[48:], "scalar": torch.tensor(3.0)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    values = {"cursor": [1, 2]}
    with AsyncWriter() as writer:
        save_checkpoint(tmp_path, 1, tensors, values, writer=writer)
        flat.fill_(-1)
        tensors["scalar"].zero_()
        values["cursor"].append(3)
        assert gate.reached.wait(30) and find_latest(tmp_path).folder is None
        gate.open.set()
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    assert load_checkpoint(tmp_path / "iter_0000001", loaded) == {"cursor": [1, 2]}
    assert all(torch.equal(loaded[name], expected[name]) for name in tensors)


def test_the_next_save_waits_and_says_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with AsyncWriter() as writer:
        first = save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, {}, writer=writer)
        assert first.waited_s == 0
        timer = threading.Timer(0.2, gate.open.set)
        timer.start()
        started = time.perf_counter()
        second = save_checkpoint(tmp_path, 2, {"w": torch.ones(4)}, {}, writer=writer)
        elapsed = time.perf_counter() - started
        assert (tmp_path / "iter_0000001").is_dir(), "the first save is complete before the second begins"
        assert 0.1 < second.waited_s <= elapsed and second.waited_s + second.blocked_s <= elapsed
        timer.join()
    assert find_latest(tmp_path).folder == tmp_path / "iter_0000002" and gate.calls == 2


def test_staging_memory_is_reused_and_freed(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(100), "gone": torch.ones(3)}
    with AsyncWriter() as writer:

        def buffers() -> dict[str, int]:
            return {index.fqn: b.data_ptr() for index, b in writer._buffers._buffers.items()}

        save_checkpoint(tmp_path, 1, tensors, {}, writer=writer)
        first = buffers()
        assert not {t.data_ptr() for t in tensors.values()} & set(first.values())
        tensors["w"] = torch.full((100,), 2.0)
        del tensors["gone"]
        save_checkpoint(tmp_path, 2, tensors, {}, writer=writer)
        assert buffers() == {"w": first["w"]}
        save_checkpoint(tmp_path, 3, {"w": torch.full((7,), 3.0).double()}, {}, writer=writer)
    assert not buffers()
    loaded = {"w": torch.zeros(7).double()}
    load_checkpoint(tmp_path / "iter_0000003", loaded)
    assert loaded["w"].eq(3).all()


def failing(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_lost_save_is_told_once_and_the_next_one_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with AsyncWriter() as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "save_file", failing)
            save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, {}, writer=writer)
            wait([writer._saving])
        save_checkpoint(tmp_path, 2, {"w": torch.full((4,), 2.0)}, {}, writer=writer, tell=told.append)
        assert writer._saving is None and find_latest(tmp_path).folder == tmp_path / "iter_0000002"
        (loss,) = told
        assert "checkpoint of iteration 1 is lost: cannot write" in loss and "No space left" in loss
        save_checkpoint(tmp_path, 3, {"w": torch.ones(4)}, {}, writer=writer, tell=told.append)
        assert writer._saving is not None and len(told) == 1, "the background serves again"
    assert find_latest(tmp_path).folder == tmp_path / "iter_0000003" and not find_latest(tmp_path).notices
    loaded = {"w": torch.zeros(4)}
    load_checkpoint(tmp_path / "iter_0000002", loaded)
    assert loaded["w"].eq(2).all()


def test_a_second_failure_in_a_row_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "save_file", failing)
    with AsyncWriter() as writer:
        save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, {}, writer=writer)
        with (
            pytest.warns(UserWarning, match="iteration 1 is lost"),
            pytest.raises(CheckpointError, match=r"iter_0000002.*No space left"),
        ):
            save_checkpoint(tmp_path, 2, {"w": torch.ones(4)}, {}, writer=writer)
    assert not list(tmp_path.iterdir())


def test_a_save_lost_on_one_rank_is_lost_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ranks: Any
) -> None:
    """The second rank's disk is full once; the next save is whole when the call returns, on both ranks."""
    root = tmp_path / "root"

    def work(rank: int, group: dist.ProcessGroup) -> None:
        told: list[str] = []
        tensors = {"w": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
        with AsyncWriter(group) as writer:
            with monkeypatch.context() as patch:
                if rank == 1:
                    patch.setattr(writer_module, "save_file", failing)
                save_checkpoint(root, 1, tensors, {}, writer=writer, tell=told.append)
                wait([writer._saving])
            save_checkpoint(root, 2, tensors, {}, writer=writer, tell=told.append)
            assert writer._saving is None and find_latest(root).folder == root / "iter_0000002"
            assert len(told) == 1 and "rank_00001" in told[0], told

    on_ranks(2, work)
    loaded = {"w": torch.zeros(8)}
    load_checkpoint(root / "iter_0000002", loaded)
    assert torch.equal(loaded["w"], torch.arange(8.0)) and not (root / "iter_0000001").exists()


def test_a_background_error_comes_out_of_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "save_file", failing)
    with pytest.raises(CheckpointError, match="No space left"), AsyncWriter() as writer:
        save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, {}, writer=writer)
    writer.close()  # nothing is left to raise


def test_a_lost_save_hides_no_other_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "save_file", failing)
    with pytest.raises(TrainingError) as error, AsyncWriter() as writer:
        save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, {}, writer=writer)
        raise TrainingError("loss is NaN.")
    assert "No space left" in error.value.__notes__[0]


def test_an_error_before_the_snapshot_comes_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with AsyncWriter() as writer, pytest.raises(CheckpointError, match="Not a directory"):
        save_checkpoint(tmp_path / "file" / "root", 1, {"w": torch.ones(4)}, {}, writer=writer)


def test_no_host_memory_for_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = torch.zeros(1).expand(1 << 50)  # 4 PiB of address space, which no machine maps
    with AsyncWriter() as writer, pytest.raises(CheckpointError, match="no host memory") as error:
        save_checkpoint(tmp_path, 1, {"w": huge}, {}, writer=writer)
    assert "--no-async-save" in error.value.mend and not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("background", [True, False])
def test_tensors_of_a_gpu(tmp_path: Path, background: bool) -> None:
    """Queued work is in the snapshot, later work is not; staging is pinned; loading fills device tensors."""
    weight = torch.zeros(1 << 22, device="cuda")
    with AsyncWriter() as writer:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(200):
                weight.add_(1)
            save_checkpoint(tmp_path, 1, {"w": weight}, {}, writer=writer if background else None)
            weight.fill_(-1)
        staged = list(writer._buffers._buffers.values())
        assert [buffer.is_pinned() for buffer in staged] == [True] * background
    load_checkpoint(tmp_path / "iter_0000001", {"w": weight})
    assert weight.eq(200).all()
