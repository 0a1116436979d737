"""Patches: minimal, valid, and read back with the values that were asked for."""

from pathlib import Path

import pytest
from good_launch import GOOD, case_of, script
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config import value_of
from redline.config.launch import read_launch
from redline.doctor import Case, Mend, patch_launch

ONE_LINE = (
    "#!/bin/bash\n#SBATCH -N 2\n\ntorchrun pretrain_gpt.py --fp16 --num-layers 4 --hidden-size 64 --lr 1e-4\n"
)
CONTINUED = """\
python pretrain_gpt.py \\
    --num-layers 4 \\
    --fp16 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --micro-batch-size 2 \\
    --transformer-impl local
"""
STRING = 'OPTIONS="--num-layers 4 --fp16 \\\n --micro-batch-size 2"\npython pretrain_gpt.py $OPTIONS\n'
ARRAY = """\
ARGS=(
  --num-layers 4 # layers --fp16
  --fp16
  --micro-batch-size 2
)
python pretrain_gpt.py ${ARRAY[@]} ${ARGS[@]}
"""


def patched(folder: Path, text: str, mend: Mend, name: str = "run.sh") -> tuple[str, Case, list[str]]:
    case = case_of(
        folder, text, gpus=1, name=name, dialect="redline" if name.endswith(".toml") else "megatron"
    )
    patch = patch_launch(case, mend)
    again = folder / f"again-{name}"
    again.write_text(patch.text)
    return patch.text, case_of(folder, patch.text, gpus=1, name=name), patch.undone


@pytest.mark.parametrize(
    "text", (ONE_LINE, CONTINUED, STRING, ARRAY), ids=("line", "continued", "string", "array")
)
def test_switches(text: str, tmp_path: Path) -> None:
    after, case, undone = patched(
        tmp_path, text, Mend(values={"fp16": False, "bf16": True, "sequence_parallel": True})
    )
    assert undone == []
    assert (
        case.config.precision.bf16
        and not case.config.precision.fp16
        and case.config.parallel.sequence_parallel
    )
    assert case.config.model.num_layers == 4
    assert "# layers --fp16" not in text or "--num-layers 4 # layers --fp16\n" in after  # comments stay


def test_values_and_removal(tmp_path: Path) -> None:
    values = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
              "micro_batch_size": 8, "transformer_impl": "transformer_engine"}  # fmt: skip
    after, case, undone = patched(tmp_path, CONTINUED, Mend(values=values))
    assert undone == [] and "recompute" not in after and "--micro-batch-size 8" in after
    assert "transformer-impl" not in after  # Megatron's default
    assert case.config.train.micro_batch_size == 8 and case.config.precision.fp16
    assert not after.rstrip("\n").endswith("\\")


def test_value_from_a_variable(tmp_path: Path) -> None:
    text = 'MBS=2\npython pretrain_gpt.py --micro-batch-size "${MBS}" --num-layers 4\n'
    after, case, _ = patched(tmp_path, text, Mend(values={"micro_batch_size": 4}))
    assert "--micro-batch-size 4 --num-layers" in after and case.config.train.micro_batch_size == 4


def test_environment(tmp_path: Path) -> None:
    text = ONE_LINE.replace("\ntorchrun", "export NCCL_IB_DISABLE=1  # why\nexport A=1\ntorchrun")
    mend = Mend(environment={"NCCL_IB_DISABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "A": None})
    after, case, undone = patched(tmp_path, text, mend)
    assert undone == [] and after.startswith("#!/bin/bash\n#SBATCH -N 2\n")
    assert case.env("NCCL_IB_DISABLE") == "0" and case.env("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert case.env("A") is None and "# why" in after


@pytest.mark.parametrize(
    ("line", "after"),
    (
        ("export A=1 B=2 C=3", "export B=2 C=3"),
        ("export B=2 A=1", "export B=2"),
        ("  export B='x y' A=1 C=3 # all", "  export B='x y' C=3 # all"),
        ("A=1 python x.py", "python x.py"),
        ("export A=1", ""),
    ),
)
def test_a_variable_among_others_is_unset(tmp_path: Path, line: str, after: str) -> None:
    command = "python pretrain_gpt.py --num-layers 4\n"
    patch, case, undone = patched(tmp_path, f"{line}\n{command}", Mend(environment={"A": None}))
    assert undone == [] and case.env("A") is None
    assert patch == (f"{after}\n{command}" if after else command)


def test_a_flag_that_two_mends_drop_is_dropped_once(tmp_path: Path) -> None:
    mend = Mend(values={"log_interval": 100}, drop=("--log-interval",))
    after, _, undone = patched(tmp_path, "python pretrain_gpt.py --num-layers 4 --log-interval 1\n", mend)
    assert undone == [] and "log-interval" not in after


def test_what_another_file_overrules_is_left_to_the_hand(tmp_path: Path) -> None:
    """A change in the script itself would have no effect where a sourced file has the last word."""
    env = tmp_path / "env.sh"
    env.write_text("# the cluster\nexport NCCL_IB_DISABLE=1 NCCL_NET=Socket\nMORE='--log-interval 1'\n")
    text = "source env.sh\npython pretrain_gpt.py --num-layers 4 $MORE\n"
    mend = Mend(values={"log_interval": 10}, environment={"NCCL_IB_DISABLE": "0", "NCCL_NET": None})
    after, case, undone = patched(tmp_path, text, mend)
    assert after == text
    lines = ["3 --log-interval 10", "2 export NCCL_IB_DISABLE=0", "2 unset NCCL_NET"]
    assert undone == [f"{env}:{line}" for line in lines]
    assert case.place("NCCL_NET") == (str(env), 2) and case.place("log_interval") == (str(env), 3)


def test_cut_off_flags_are_left_to_the_hand(tmp_path: Path) -> None:
    """A change beside them would stand twice once their line is joined again."""
    text = "python pretrain_gpt.py --num-layers 4\n  --fp16 --micro-batch-size 2\n"
    mend = Mend(values={"fp16": False, "bf16": True, "micro_batch_size": 4})
    after, _, undone = patched(tmp_path, text, mend)
    assert after == text.replace("--num-layers", "--bf16 --num-layers")
    assert undone == [f"{tmp_path}/run.sh:2 --micro-batch-size 4"]


def test_an_old_flag_goes_with_all_that_it_states(tmp_path: Path) -> None:
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    text = "python pretrain_gpt.py --num-layers 4 --checkpoint-activations --bf16\n"
    after, _, undone = patched(tmp_path, text, Mend(values=dict.fromkeys(names)))
    assert (after, undone) == ("python pretrain_gpt.py --num-layers 4 --bf16\n", [])


def test_what_cannot_be_placed_is_said(tmp_path: Path) -> None:
    text = 'add() { ARGS+=("--$1"); }\nadd fp16\npython pretrain_gpt.py "${ARGS[@]}" "--num-layers=4"\n'
    after, _, undone = patched(tmp_path, text, Mend(values={"sequence_parallel": True}))
    assert undone == ["--sequence-parallel"] and after == text


def test_toml(tmp_path: Path) -> None:
    text = "# my run\n[model]\nnum_layers = 4\nhidden_size = 64\nnum_attention_heads = 4\n\n"
    text += "[precision]\nfp16 = true\n"
    mend = Mend(values={"fp16": False, "bf16": True, "micro_batch_size": 4, "num_layers": 8})
    after, case, undone = patched(tmp_path, text, mend, "run.toml")
    assert undone == [] and after.startswith("# my run\n")
    assert case.config.precision.bf16 and not case.config.precision.fp16
    assert case.config.train.micro_batch_size == 4 and case.config.model.num_layers == 8


def test_yaml(tmp_path: Path) -> None:
    """A new key goes beside those of its section: fp16 never leaves without bf16 taking its place."""
    text = (
        "model_parallel:\n  fp16: true # old\n  tensor_model_parallel_size: 4\n"
        "language_model:\n  num_layers: 4\nmicro_batch_size: 1\n"
    )
    values = {"fp16": False, "bf16": True, "sequence_parallel": True, "rerun_mode": "disabled"}
    after, case, undone = patched(tmp_path, text, Mend(values=values, environment={"A": "1"}), "run.yaml")
    assert undone == ["export A=1"] and after.startswith(
        "model_parallel:\n  fp16: false # old\n  bf16: true\n"
    )
    assert {name: value_of(case.config, name) for name in values} == values


def test_diff_is_minimal(tmp_path: Path) -> None:
    case = case_of(tmp_path, script())
    diff = patch_launch(case, Mend(values={"micro_batch_size": 2})).diff("a", "b").splitlines()
    changed = [line for line in diff if line[0] in "+-" and not line.startswith(("+++", "---"))]
    assert changed == ["-  --micro-batch-size 1", "+  --micro-batch-size 2"]
    assert patch_launch(case, Mend()).text == case.launch.text  # type: ignore[union-attr]


CHANGES = {
    "micro_batch_size": st.sampled_from((1, 2, 4)),
    "sequence_parallel": st.booleans(),
    "tp_comm_overlap": st.booleans(),
    "bf16": st.booleans(),
    "gradient_accumulation_fusion": st.booleans(),
    "recompute_granularity": st.sampled_from((None, "selective")),
    "attention_backend": st.sampled_from(("auto", "flash", "fused")),
    "num_workers": st.integers(0, 8),
    "eval_iters": st.integers(1, 100),
    "overlap_grad_reduce": st.booleans(),
}


@given(
    changes=st.fixed_dictionaries({}, optional=CHANGES),
    without=st.lists(st.sampled_from(sorted(GOOD)[:12]), unique=True, max_size=3),
    shape=st.sampled_from(("array", "continued", "line")),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_change_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object], without: list[str], shape: str
) -> None:
    folder = tmp_path_factory.mktemp("patch")
    flags = [f"{flag} {words}" if words else flag for flag, words in GOOD.items() if flag not in without]
    join = {"array": "\n  ", "continued": " \\\n  ", "line": " "}[shape]
    body = join.join(flags)
    text = (
        f"A=(\n  {body}\n)\npython pretrain_gpt.py ${{A[@]}}\n"
        if shape == "array"
        else f"python pretrain_gpt.py {body}\n"
    )
    case = case_of(folder, text)
    patch = patch_launch(case, Mend(values=changes))
    (folder / "new.sh").write_text(patch.text)
    again = read_launch(folder / "new.sh")
    assert patch.undone == []
    for name, value in changes.items():
        mine = case_of(folder, patch.text).get(name)
        assert (mine or False) == (value or False), name
    assert case.launch is not None
    for name in case.launch.stated - changes.keys():
        assert value_of(again.config, name) == value_of(case.config, name), name
