"""Flags of a script: fields, old spellings, misspelt ones, what is contradictory, what is open and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.config import value_of
from redline.config.launch import Launch, read_launch
from redline.config.launch.megatron_names import SWITCHES, VALUED
from redline.config.launch.successors import SUCCESSORS, old_spelling, rewritten
from redline.config.launch.values import Place
from redline.config.tree import spellings

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.sh"


def read(script: Path, text: str, **sets: str) -> Launch:
    script.write_text(text)
    return read_launch(script, set_values=sets)


def run(script: Path, flags: str, before: str = "", **sets: str) -> Launch:
    """A script that sets some variables and starts the training with these flags."""
    return read(script, f"{before}\ntorchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE} {flags}\n", **sets)


def problems(launch: Launch) -> dict[str, str]:
    return {problem.rule: f"{problem.what} {problem.why} {problem.mend}" for problem in launch.problems}


def test_states_of_flags(script: Path) -> None:
    launch = run(script, "--swiglu --q-lora-rank 512 --tensor-model-parralel-size 2 --lr=1e-4")
    states = {use.flag: (use.value, use.field, use.state, use.nearest) for use in launch.flags[3:]}
    assert states == {
        "--swiglu": (None, "activation_func", "understood", None),
        "--q-lora-rank": ("512", None, "megatron-only", None),
        "--tensor-model-parralel-size": ("2", None, "unknown", "--tensor-model-parallel-size"),
        "--lr": ("1e-4", "lr", "understood", None),
    }
    assert launch.stated >= {"activation_func", "lr", "num_layers"}
    assert "tensor_model_parallel_size" not in launch.stated


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--model-parallel-size 4", "tensor_model_parallel_size", 4),
        ("--batch-size 2", "micro_batch_size", 2),
        ("--num-key-value-heads 2", "num_query_groups", 2),
        ("--activations-checkpoint-method uniform", "recompute_granularity", "full"),
        ("--pad-vocab-size-to 50304", "padded_vocab_size", 50304),
        ("--use-dist-ckpt", "ckpt_format", "torch_dist"),
        ("--rope-theta 500000", "rotary_base", 500000.0),
        ("--disable-tp-comm-split-ag", "tp_comm_overlap_ag", False),
    ],
)
def test_old_flags_are_read_as_what_they_mean(script: Path, flags: str, field: str, value: object) -> None:
    launch = run(script, flags)
    assert value_of(launch.config, field) == value
    assert field in launch.stated
    assert "old-spelling" in problems(launch)
    assert launch.flags[3].state == "understood"


def test_every_successor_is_a_flag_that_exists() -> None:
    for flag, successor in SUCCESSORS.items():
        problem = old_spelling(flag, "1")
        assert problem is not None and problem.why and problem.mend
        assert flag in spellings() or flag in SWITCHES | VALUED, f"{flag} is not known at all"
        words = [word.strip("().,") for word in problem.mend.split()]
        for word in filter(lambda word: word.startswith("--"), words):
            assert word in spellings() or word in SWITCHES | VALUED, f"{flag} leads to {word}"
        if successor.same:
            meant = rewritten(flag, "1")
            assert meant and meant[0] in spellings()


def test_the_name_lists_are_flags_and_disjoint() -> None:
    assert not SWITCHES & VALUED
    assert all(name.startswith("--") and " " not in name for name in SWITCHES | VALUED)
    assert len(SWITCHES | VALUED) > 600


def test_contradictions_and_bad_values_are_collected(script: Path) -> None:
    flags = (
        "--fp16 --bf16 --micro-batch-size 0 --normalization rmsnorm --lr 1 --lr 2 --num-query-groups 2 --seed"
    )
    found = problems(run(script, flags))
    assert {"one-of/precision", "bad-value", "given-twice", "needs/num-query-groups", "needs-value"} <= set(
        found
    )
    assert "1 (line 2) and 2 (line 2)" in found["given-twice"]


def test_rules_of_the_tree_are_problems(script: Path) -> None:
    found = problems(run(script, "--tensor-model-parallel-size 3 --sequence-parallel"))
    assert any("divide" in rule for rule in found), found


def test_a_missing_shape_is_a_problem(script: Path) -> None:
    launch = read(script, "torchrun pretrain_gpt.py --lr 1 --bf16")
    assert "shape-stated" in problems(launch)


def test_an_open_shape_is_none(script: Path) -> None:
    launch = read(
        script, "torchrun pretrain_gpt.py --num-layers $L --hidden-size $H --num-attention-heads $N"
    )
    assert "shape-stated" not in problems(launch)
    assert launch.open_fields == {"num_layers", "hidden_size", "num_attention_heads"}
    assert {a.name: a.used_by for a in launch.assumptions} == {
        "L": ("--num-layers",),
        "H": ("--hidden-size",),
        "N": ("--num-attention-heads",),
    }


def test_branches_leave_the_difference_open(script: Path) -> None:
    before = """
if [ "$1" = big ]; then A="--seq-length 8192 --bf16"; LR=1e-4
else A="--seq-length 4096 --bf16"; LR=1e-4; fi"""
    launch = run(script, "$A --lr $LR", before)
    assert value_of(launch.config, "bf16") is True
    assert value_of(launch.config, "lr") == 1e-4
    assert launch.open_fields == {"seq_length"}
    (assumption,) = launch.assumptions
    assert (assumption.name, assumption.used_by, assumption.choices) == ("1", ("--seq-length",), ("big",))
    values = {use.value for use in launch.flags if use.flag == "--seq-length"}
    assert values == {"8192", "4096"}
    assert value_of(run(script, "$A", before, **{"1": "big"}).config, "seq_length") == 8192
    assert value_of(run(script, "$A", before, **{"1": "small"}).config, "seq_length") == 4096


def test_a_usage_message_is_not_the_way_taken(script: Path) -> None:
    before = 'if [ $# -lt 2 ] || [ -z "$1" ]; then echo "usage"; exit 1; fi\nTP=${2:-4}'
    launch = run(script, "--tensor-model-parallel-size $TP", before)
    assert value_of(launch.config, "tensor_model_parallel_size") == 4


def test_toggles_that_nothing_sets_are_off(script: Path) -> None:
    before = 'if [ "$USE_FP8" = 1 ]; then A="--fp8-format hybrid"; fi'
    launch = run(script, "$A", before)
    assert "fp8_format" not in launch.stated | launch.open_fields
    (assumption,) = launch.assumptions
    assert (assumption.name, assumption.choices) == ("USE_FP8", ("1",))
    assert value_of(run(script, "$A", before, USE_FP8="1").config, "fp8_format") == "hybrid"


def test_set_has_the_last_word(script: Path) -> None:
    before = "TP=2; TP=$((TP * 2))"
    assert (
        value_of(run(script, "--tensor-model-parallel-size $TP", before).config, "tensor_model_parallel_size")
        == 4
    )
    launch = run(script, "--tensor-model-parallel-size $TP", before, TP="8")
    assert value_of(launch.config, "tensor_model_parallel_size") == 8


def test_paths_with_unknown_folders_are_stated(script: Path) -> None:
    launch = run(script, '--save "$OUT/ckpt" --load $2 --tensorboard-dir $HOME/tb')
    assert launch.config.checkpoint.save == "$OUT/ckpt"
    assert launch.config.logging.tensorboard_dir == "$HOME/tb"
    assert [assumption.name for assumption in launch.assumptions] == ["2"]


def test_further_flags_may_hide_in_a_variable(script: Path) -> None:
    launch = run(script, "$EXTRA_ARGS --lr 1")
    assert [(a.name, a.why) for a in launch.assumptions] == [("EXTRA_ARGS", "it may hold further flags.")]
    assert value_of(run(script, "$EXTRA_ARGS", EXTRA_ARGS="--lr 2 --bf16").config, "lr") == 2.0


def test_the_richest_command_is_read(script: Path) -> None:
    text = f"torchrun pretrain_gpt.py --lr 1 --bf16\ntorchrun train_other.py {SHAPE} --lr 2\n"
    launch = read(script, text)
    assert launch.entry == "train_other.py"
    assert [assumption.name for assumption in launch.assumptions] == ["command at line 1"]


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=4 pretrain_gpt.py", ("torchrun", 8, 2, 4)),
        ("torchrun --standalone --nproc_per_node 4 pretrain_gpt.py", ("torchrun", 4, 1, 4)),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 pretrain_gpt.py", ("torchrun", None, None, 8)),
        ("torchrun --nnodes 2:2 --nproc_per_node 8 pretrain_gpt.py", ("torchrun", 16, 2, 8)),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py", ("torchrun", None, 1, None)),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node gpu pretrain_gpt.py", ("torchrun", 2, 1, 2)),
        ("python3 -m torch.distributed.run --nproc_per_node 2 pretrain_gpt.py", ("torchrun", 2, 1, 2)),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 t_pretrain.py",
            ("torch.distributed.launch", 2, 1, 2),
        ),
        ("deepspeed --num_gpus 4 pretrain_gpt.py", ("deepspeed", 4, 1, 4)),
        ("deepspeed --include localhost:0,1,2 pretrain_gpt.py", ("deepspeed", 3, 1, 3)),
        ("deepspeed --hostfile hosts --num_gpus 8 pretrain_gpt.py", ("deepspeed", None, None, 8)),
        ("mpirun -np 16 --map-by ppr:8:node python pretrain_gpt.py", ("mpirun", 16, 2, 8)),
        ("mpiexec -n 8 -ppn 4 python pretrain_gpt.py", ("mpirun", 8, 2, 4)),
        ("srun -N 4 --ntasks-per-node=8 python -u pretrain_gpt.py", ("srun", 32, 4, 8)),
        ("srun -n16 --nodes 2 python pretrain_gpt.py", ("srun", 16, 2, 8)),
        ("srun --ntasks=16 python pretrain_gpt.py", ("srun", 16, None, None)),
        ("srun python pretrain_gpt.py", ("srun", None, None, None)),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py", ("torchrun", 16, 2, 8)),
        ("numactl --membind 0 nsys profile -o x.py -t cuda python pretrain_gpt.py", ("python", 1, 1, 1)),
        ("export WORLD_SIZE=64; exec python pretrain_gpt.py", ("python", 64, None, None)),
        ("env -u A WORLD_SIZE=4 python -m megatron.pretrain", ("python", 4, None, None)),
        ("accelerate launch --num_processes 8 --num_machines 2 pretrain_gpt.py", ("accelerate", 8, 2, 4)),
        (
            "docker run --gpus all img bash -lc 'torchrun --nproc_per_node 8 pretrain_gpt.py FLAGS'",
            ("torchrun", 8, 1, 8),
        ),
        ("ssh host 'torchrun --nproc_per_node 8 pretrain_gpt.py FLAGS'", ("torchrun", 8, 1, 8)),
        ("sbatch -N 2 --wrap 'srun --ntasks-per-node 8 python pretrain_gpt.py FLAGS'", ("srun", 16, 2, 8)),
        ("nohup time torchrun --nproc_per_node 8 pretrain_gpt.py", ("torchrun", 8, 1, 8)),
    ],
)
def test_launchers(script: Path, command: str, facts: tuple[str, int | None, int | None, int | None]) -> None:
    text = command.replace("FLAGS", SHAPE) if "FLAGS" in command else f"{command} {SHAPE} > log 2>&1"
    launch = read(script, text)
    assert (launch.launcher, launch.world_size, launch.nnodes, launch.nproc_per_node) == facts
    if launch.world_size is None:
        assert any("world_size" in assumption.used_by for assumption in launch.assumptions)
    assert value_of(launch.config, "num_layers") == 2


def test_directives_of_slurm(script: Path) -> None:
    head = "#!/bin/bash\n#SBATCH -N 4 --gres=gpu:h100:8   # nodes\n#SBATCH --ntasks-per-node 8\n"
    head += "##SBATCH --nodes=9\n"
    launch = read(
        script, f"{head}srun python pretrain_gpt.py {SHAPE} --seed $SLURM_NNODES --lr $SLURM_GPUS_ON_NODE"
    )
    assert (launch.world_size, launch.nnodes, launch.nproc_per_node) == (32, 4, 8)
    assert value_of(launch.config, "seed") == 4
    assert value_of(launch.config, "lr") == 8.0
    by_name = {assumption.name: assumption for assumption in launch.assumptions}
    assert by_name["SLURM_NNODES"].choices == ("4",)
    assert {"--seed", "nnodes"} <= set(by_name["SLURM_NNODES"].used_by)
    assert by_name["SLURM_NNODES"].line == 2
    launch = read_launch(script, set_values={"SLURM_NNODES": "2"})
    assert (launch.world_size, launch.nnodes) == (16, 2)
    assert value_of(launch.config, "seed") == 2


def test_a_script_that_submits_another(tmp_path: Path, script: Path) -> None:
    (tmp_path / "job.sh").write_text(
        f"#SBATCH --nodes=2\nsrun python pretrain_gpt.py {SHAPE} --micro-batch-size $1\n"
    )
    launch = read(script, "export X=1\nsbatch --nodes=4 --ntasks-per-node=8 job.sh 3")
    assert (launch.world_size, value_of(launch.config, "micro_batch_size")) == (32, 3)
    assert launch.flags[-1].file.name == "job.sh"
    assert launch.environment["X"] == ("1", Place(script, 1))


def test_the_environment(script: Path) -> None:
    before = """export A=1
B=2 ; export B
C=3
export D=${D:-4} E="x y"
unset A
if [ $MODE = x ]; then export F=1; else export F=2; fi
declare -x G=7"""
    launch = run(script, "", before)
    assert {name: value for name, (value, _) in launch.environment.items()} == {
        "B": "2",
        "D": "4",
        "E": "x y",
        "G": "7",
    }
    assert launch.environment["E"] == ("x y", Place(script, 4))
    (assumption,) = launch.assumptions
    assert (assumption.name, assumption.used_by, assumption.choices) == ("MODE", ("F",), ("x",))


@pytest.mark.parametrize("size", ("${1:-8B}", "${MODEL:-8B}", '"${SIZE:-8B}"'))
@pytest.mark.parametrize(
    "sizes",
    (
        'case "$SIZE" in 1B) L=16 ;; 8B|8b) L=32 ;; 70B) L=80 ;; *) exit 1 ;; esac',
        "if [ $SIZE = 1B ]; then L=16; elif [[ $SIZE == 8B || $SIZE == 8b ]]; then L=32; "
        'elif [ "$SIZE" = "70B" ]; then L=80; fi',
    ),
    ids=("case", "if"),
)
def test_a_default_among_other_sizes(script: Path, size: str, sizes: str) -> None:
    launch = run(script, " --seed $L", f"SIZE={size}\n{sizes}")
    name = "MODEL" if "MODEL" in size else "SIZE"
    (assumption,) = launch.assumptions
    assert assumption.name == name and assumption.line == 1
    assert assumption.choices[0] == "8B" and set(assumption.choices) >= {"1B", "8B", "70B"}
    assert value_of(launch.config, "seed") == 32
    launch = read_launch(script, set_values={name: "70B"})
    assert launch.assumptions == () and value_of(launch.config, "seed") == 80


def test_a_default_that_nothing_else_is_said_of(script: Path) -> None:
    before = "TP=${TP:-2}\nX=${X:-1}\nif [ $X = 1 ]; then Y=1; fi\nf() { case ${1:-a} in b) Y=2 ;; esac; }\nf"
    assert run(script, " --tensor-model-parallel-size $TP", before).assumptions == ()


def test_flags_behind_a_line_that_does_not_go_on(script: Path) -> None:
    text = f"torchrun pretrain_gpt.py {SHAPE} \\ # the model\n  --bf16 --lr 1e-4 \\\n  --seed 3\n"
    launch = read(script, text)
    assert [(use.flag, use.value, use.line) for use in launch.cut_off] == [
        ("--bf16", None, 2),
        ("--lr", "1e-4", 2),
        ("--seed", "3", 3),
    ]
    assert not launch.stated & {"bf16", "lr", "seed"}
    assert read(script, text.replace(" # the model", "")).cut_off == ()


def test_lines_of_a_heredoc_and_printf(script: Path) -> None:
    before = "mapfile -t MORE <<EOF\n--bf16\n--lr=1e-4\nEOF\nprintf -v BATCH '%d' $((8 * 16))\nprintf 'hello %s' you"
    launch = run(script, '--global-batch-size $BATCH "${MORE[@]}"', before)
    assert {name: value_of(launch.config, name) for name in ("bf16", "lr", "global_batch_size")} == {
        "bf16": True,
        "lr": 1e-4,
        "global_batch_size": 128,
    }
    assert [use.line for use in launch.flags[-2:]] == [2, 3] and launch.assumptions == ()
    open_ = run(script, "--seed $X", "printf -v X '%03d' 7")
    assert "seed" not in open_.stated and [each.name for each in open_.assumptions] == ["X"]


def test_a_file_of_flags_beside_the_script(script: Path, tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text("--bf16\n--lr 1e-4\n")
    launch = run(script, "$(cat args.txt)")
    assert value_of(launch.config, "bf16") and value_of(launch.config, "lr") == 1e-4
    use = launch.flags[-1]
    assert (use.flag, use.file, use.line) == ("--lr", tmp_path / "args.txt", 2)
    away = run(script, "$(cat /etc/hostname) $(cat ../other.txt) $(cat missing.txt)")
    assert all("cat" in each.name for each in away.assumptions) and len(away.assumptions) == 3


def test_recompute_of_2021_is_full(script: Path) -> None:
    launch = run(script, "--checkpoint-activations --deepspeed-activation-checkpointing")
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    assert [value_of(launch.config, name) for name in names] == ["full", "uniform", 1]


def test_windows_line_ends(script: Path) -> None:
    """Read as they are meant where bash gets that far, and said: the CR is a part of the last word."""
    script.write_bytes(
        f"TP=2\r\ntorchrun pretrain_gpt.py {SHAPE} --tensor-model-parallel-size $TP\r\n".encode()
    )
    launch = read_launch(script)
    assert value_of(launch.config, "tensor_model_parallel_size") == 2
    assert launch.flags[-1].line == 2
    assert "\r\n" in launch.text
    assert "CR LF" in problems(launch)["unix-line-ends"]


def test_windows_line_ends_continue_no_command(script: Path) -> None:
    """As bash has it (`--tensor-model-parallel-size: command not found`), in a sourced file too."""
    sourced = script.with_name("more.sh")
    command = f"torchrun pretrain_gpt.py {SHAPE} \\\r\n --tensor-model-parallel-size 2\r\n".encode()
    for path, content in (script, command), (sourced, command):
        path.write_bytes(content)
        launch = read_launch(script)
        assert value_of(launch.config, "tensor_model_parallel_size") == 1
        (use,) = launch.cut_off
        assert (use.flag, use.file, use.line) == ("--tensor-model-parallel-size", path, 2)
        script.write_text("source more.sh\n")


def test_text_is_what_stands_in_the_file(script: Path) -> None:
    data = b"# caf\xe9 \xe4\xb8\xad\n" + f"torchrun pretrain_gpt.py {SHAPE}\n".encode()
    script.write_bytes(data)
    assert read_launch(script).text.encode("utf-8", "surrogateescape") == data
