"""Variables of CUDA and NCCL: what a layout sets, and what it complains of."""

from __future__ import annotations

import os

import pytest

from redline.build import set_communication
from redline.config import Environment, RunConfig, parse_args, read_environment
from redline.plan import complaints, wanted_settings

TP = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --mock-data"
CHUNKED = f"{TP} --tp-comm-overlap-method chunked"
TWICE = "--mock-data --use-distributed-optimizer --num-distributed-optimizer-instances 2"


def config_of(words: str) -> RunConfig:
    return parse_args(words.split()).config


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--mock-data", []),
        (TP, []),
        (f"{TP} --fp8", []),
        (CHUNKED, ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        ("--mock-data --deterministic-mode", ["NCCL_ALGO"]),
        (
            "--mock-data --flight-recorder-dump-path here/rank",
            ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"],
        ),
    ],
)
def test_what_a_layout_needs(words: str, names: list[str]) -> None:
    assert [setting.name for setting in wanted_settings(config_of(words))] == names


@pytest.mark.parametrize(
    ("words", "found", "said"),
    [
        ("--mock-data", {}, []),
        ("--mock-data", {"NCCL_P2P_DISABLE": "0", "NCCL_IB_HCA": "mlx5_0"}, []),
        (
            "--mock-data",
            {"NCCL_P2P_DISABLE": "1"},
            ["NCCL_P2P_DISABLE=1 is set: it keeps NCCL from the fast"],
        ),
        ("--mock-data", {"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING=1 is set: every kernel"]),
        ("--mock-data", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, []),
        ("--mock-data", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, []),
        (
            TWICE,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            ["CUDA_DEVICE_MAX_CONNECTIONS=1 is set: a sum across instances"],
        ),
        (f"{TWICE} --no-overlap-grad-reduce", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, []),
        (CHUNKED, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, []),
        (
            CHUNKED,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
            ["CUDA_DEVICE_MAX_CONNECTIONS=8 is set, not 1: a piece"],
        ),
        ("--mock-data --deterministic-mode", {"NCCL_ALGO": "Ring"}, []),
        (
            "--mock-data --deterministic-mode",
            {"NCCL_ALGO": "NVLSTree"},
            ["NCCL_ALGO=NVLSTree is set, not ^NVLS"],
        ),
    ],
)
def test_what_stands_in_the_way_is_named(words: str, found: dict[str, str], said: list[str]) -> None:
    sentences = list(complaints(config_of(words), read_environment(found).communication()))
    assert len(sentences) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(sentences, said, strict=True))


@pytest.mark.parametrize(
    ("words", "found", "ran"),
    [
        (CHUNKED, {"NCCL_DEBUG": "WARN"}, "CUDA_DEVICE_MAX_CONNECTIONS=1, NCCL_DEBUG=WARN (as found)"),
        (CHUNKED, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS=8 (as found)"),
        ("--mock-data --deterministic-mode", {}, "NCCL_ALGO=^NVLS"),
    ],
)
def test_the_user_wins_and_all_is_recorded(
    words: str, found: dict[str, str], ran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "environ", {**ranks, **found})
    (choice,) = set_communication(config_of(words), read_environment())
    assert choice.ran == ran
    settings = dict(item.removesuffix(" (as found)").split("=", 1) for item in ran.split(", "))
    assert os.environ == {**ranks, **settings}


def test_one_queue_beside_instances_is_recorded_with_its_price() -> None:
    (setting,) = wanted_settings(config_of(f"{CHUNKED} {TWICE.removeprefix('--mock-data')}"))
    assert setting.value == "1" and "holds backward's kernels up" in setting.why


def test_what_torch_elastic_sets_is_not_told_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    monkeypatch.setattr(os, "environ", {**ranks, **elastic})
    assert set_communication(config_of("--mock-data"), read_environment()) == ()
    monkeypatch.setitem(os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    (choice,) = set_communication(config_of("--mock-data"), read_environment())
    assert choice.ran == "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (as found)"


def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert set_communication(config_of("--mock-data --deterministic-mode"), Environment()) == ()
    assert os.environ == {}
