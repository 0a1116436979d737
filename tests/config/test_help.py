"""Help, the printed page of options, and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.config import SECTIONS, Environment, InvalidConfigError, format_help, options, read_environment
from redline.config.docs import options_page
from redline.config.slurm import first_host, tasks_here

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_short_help_is_short_and_grouped() -> None:
    text = format_help(width=100)
    shown = [option for option in options() if option.spec.short]
    assert 30 <= len(shown) <= 45
    assert all(f"  {option.flag}" in text for option in shown)
    assert "--moe-router-topk" not in text
    assert text.index("Model:") < text.index("Data:") < text.index("Training:") < text.index("Checkpoints:")
    assert "--help-all" in text


def test_long_help_has_every_option_and_says_what_waits() -> None:
    text = format_help(short=False, width=100)
    for option in options():
        assert f"  {option.shown_flag}" in text, option.flag
    switches = {option.flag: option.shown_flag for option in options()}
    for name in ("fp8-param-gather", "parameter-transpose-cache"):  # on where it can be, and on by default
        assert switches[f"--{name}"] == f"--[no-]{name}"
    for flag in ("--bf16", "--attention-softmax-in-fp32", "--fp8-format"):  # off, always done, and no switch
        assert switches[flag] == flag
    assert all(f"{section.title}:" in text for section in SECTIONS.values())
    squeezed = " ".join(text.split())
    assert "Stages of layers (pp). [default 1; not available yet]" in squeezed
    assert "PyTorch's fully sharded data parallel. [not part of Redline]" in squeezed


def test_a_switch_that_follows_something_else_says_what() -> None:
    """Neither on nor off by default, it has both forms; help and page name what decides."""
    words, page = " ".join(format_help(short=False, width=200).split()), options_page().splitlines()
    follow = [each for each in options() if each.kind is bool and each.default is None]
    for switch in follow:
        if switch.state == "active":
            shown = f"--[no-]{switch.flag[2:]}"
            assert (
                switch.spec.unset and f" {shown} {switch.spec.help} [default: {switch.spec.unset}]" in words
            )
            (row,) = [row for row in page if row.startswith(f"| `{shown}` |")]
            assert row.split(" | ")[1] == switch.spec.unset
    fused = [switch.flag for switch in follow if switch.spec.unset == "as --transformer-impl"]
    assert len(fused) == 10 and "--persist-layer-norm" in fused and "--adamw-fusion" in fused


@pytest.mark.parametrize("width", [40, 72, 200])
def test_help_fits_the_terminal(width: int) -> None:
    for line in format_help(short=False, width=width).splitlines():
        assert len(line) <= max(width, 56) or " " not in line.strip()


def test_page_of_options_is_up_to_date() -> None:
    """`python -m redline.config.docs docs/options.md` prints it."""
    assert PAGE.read_text() == options_page()


def test_environment_is_read_once_and_checked() -> None:
    env = {
        "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "2", "NO_COLOR": "1",
        "NCCL_IB_HCA": "mlx5", "TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "NVTE_FLASH_ATTN": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TRITON_INTERPRET": "0", "XDG_CACHE_HOME": "/c", "PATH": "/bin",
    }  # fmt: skip
    found = read_environment(env)
    assert (found.rank, found.world_size, found.local_rank, found.omp_num_threads) == (3, 8, 1, 2)
    assert found.nccl == (("NCCL_IB_HCA", "mlx5"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "9"))
    assert found.transformer_engine == (("NVTE_FLASH_ATTN", "1"),)
    assert found.no_color and not found.triton_interpret
    assert found.cache_dir == Path("/c/redline")
    assert [problem.rule for problem in found.problems()] == ["environment"]  # nobody says where to meet
    assert not read_environment({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).problems()
    assert read_environment({"RANK": "2", "WORLD_SIZE": "1"}).problems()


def test_slurm_says_which_rank_a_task_is() -> None:
    env = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[007-008],x1", "SLURM_JOB_ID": "41",
    }  # fmt: skip
    found = read_environment(env)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port, found.launched) == ("gpu007", 20041, True)
    assert read_environment({**env, "MASTER_PORT": "7"}).master_port == 7
    assert read_environment({**env, "RANK": "0"}).world_size == 1, "torchrun inside Slurm goes before"
    assert not read_environment({**env, "SLURM_STEP_NUM_TASKS": ""}).launched, "a batch script is no task"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3,5-9]", "n3"), ("n[01-02]-ib,m", "n01-ib"), ("x-1,x-2", "x-1")],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_of_a_node() -> None:
    assert [tasks_here("4(x2),3", node) for node in range(4)] == ["4", "4", "3", "1"]


def test_environment_of_one_process_is_no_problem() -> None:
    assert read_environment({}).problems() == Environment().problems() == []
    assert read_environment({"HOME": "/h"}).cache_dir == Path("/h/.cache/redline")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_a_bad_environment_variable_is_named(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"the environment variable {name} is 'many'"):
        read_environment({name: "many"})
