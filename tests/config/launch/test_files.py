"""TOML configs, run folders and YAML configs as launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.config import parse_args, to_toml, value_of
from redline.config.launch import read_launch
from redline.errors import ConfigError, DataError

MEGATRON = """\
# a configuration for --yaml-cfg
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  num_query_groups: null
  activation_func: swiglu
  add_bias_linear: False
  attention_dropout: 0.0
  layernorm_epsilon: 1e-5
model_parallel:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  sequence_parallel: true
  bf16: True
  gradient_accumulation_fusion: False
  deallocate_pipeline_outputs: True
micro_batch_size: 2
global_batch_size: 128
train_iters: 250_000
lr: 4.5e-4
data_path: ${DATA}
recompute_modules: [core_attn, mlp]
split: 949,50,1
no_save_optim: true
swigloo: true
"""


def test_toml_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nnum_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\n[optim]\nlr = 1e-3\nlrr = 2\n"
    )
    launch = read_launch(path)
    assert (launch.kind, launch.world_size, launch.launcher) == ("toml", None, None)
    assert launch.stated == {"num_layers", "hidden_size", "num_attention_heads", "lr"}
    assert [(use.flag, use.line, use.state, use.nearest) for use in launch.flags[-2:]] == [
        ("lr", 6, "understood", None),
        ("lrr", 7, "unknown", "lr"),
    ]
    assert any(problem.rule == "unknown-key" for problem in launch.problems)


def test_toml_of_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "llama3-8b"\nbf16 = true\n')
    launch = read_launch(path)
    assert value_of(launch.config, "num_layers") == 32
    assert not launch.problems


def test_a_toml_without_a_model_is_the_demo(tmp_path: Path) -> None:
    """As `redline train` takes it; a part of a shape is no model."""
    path = tmp_path / "run.toml"
    path.write_text("[train]\ntrain_iters = 3\n")
    launch = read_launch(path)
    assert value_of(launch.config, "preset") == "demo" and value_of(launch.config, "hidden_size") == 192
    assert launch.stated == {"train_iters"} and not launch.problems
    path.write_text("[model]\nnum_layers = 3\n")
    assert [problem.rule for problem in read_launch(path).problems] == ["shape-stated"]


@pytest.mark.parametrize(
    ("program", "rules"), [("-m redline train", []), ("pretrain_gpt.py", ["shape-stated"])]
)
def test_only_redline_has_a_demo(tmp_path: Path, program: str, rules: list[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python {program} --train-iters 3\n")
    assert [problem.rule for problem in read_launch(script).problems] == rules
    script.write_text(f"python {program} --num-layers $L --hidden-size 64 --num-attention-heads 4\n")
    assert value_of(read_launch(script).config, "preset") is None


def test_no_toml_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("= = =")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_launch(path)


def test_run_folder(tmp_path: Path) -> None:
    config = parse_args(["--preset", "gpt2-124m", "--train-iters", "7", "--mock-data"]).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    launch = read_launch(tmp_path)
    assert (launch.kind, launch.path) == ("run-folder", tmp_path)
    assert launch.config == config
    assert launch.flags[0].file == tmp_path / "config.toml"


def test_megatron_yaml(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(MEGATRON)
    launch = read_launch(path)
    values = {use.field: value_of(launch.config, use.field) for use in launch.flags if use.field}
    assert launch.kind == "yaml"
    assert values["num_layers"] == 24
    assert values["activation_func"] == "swiglu"
    assert values["add_bias_linear"] is False
    assert values["norm_epsilon"] == 1e-5
    assert values["tensor_model_parallel_size"] == 2
    assert values["sequence_parallel"] is True
    assert values["gradient_accumulation_fusion"] is False
    assert values["train_iters"] == 250_000
    assert values["lr"] == 4.5e-4
    assert values["recompute_modules"] == ("core_attn", "mlp")
    assert values["save_optim"] is False
    lines = {use.flag: use.line for use in launch.flags}
    assert (lines["num_layers"], lines["tensor_model_parallel_size"], lines["split"]) == (3, 12, 24)
    assert [use.flag for use in launch.flags if use.state == "unknown"] == [
        "deallocate_pipeline_outputs",
        "swigloo",
    ]
    assert [(a.name, a.used_by) for a in launch.assumptions] == [("DATA", ("data_path",))]
    launch = read_launch(path, set_values={"DATA": "corpus"})
    assert value_of(launch.config, "data_path") == ("corpus",)
    assert not launch.assumptions


def test_nested_yaml_of_other_launchers(tmp_path: Path) -> None:
    path = tmp_path / "train.yml"
    path.write_text(
        "trainer:\n  devices: 8\n  num_nodes: 4\nmodel:\n  micro_batch_size: 1\n"
        "  num_layers: 2\n  hidden_size: 64\n"
        "  num_attention_heads: 4\n  data: {seq_length: 2048}\n"
    )
    launch = read_launch(path)
    assert (launch.world_size, launch.nnodes, launch.nproc_per_node) == (32, 4, 8)
    assert value_of(launch.config, "seq_length") == 2048
    assert not launch.problems


def test_yaml_named_by_a_script(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(MEGATRON)
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg gpt.yaml --lr 1\n")
    launch = read_launch(script)
    assert launch.world_size == 8
    assert value_of(launch.config, "num_layers") == 24
    assert value_of(launch.config, "lr") == 1.0
    assert {use.file.name for use in launch.flags} == {"train.sh", "gpt.yaml"}


HOSTILE = {
    "object": "lr: !!python/object/apply:os.system ['touch hacked']",
    "bomb": "a: &a [x, x]\n"
    + "\n".join(f"b{n}: &b{n} [*{'a' if n == 0 else f'b{n - 1}'}, *a]" for n in range(90)),
    "deep flow": "[" * 100_000,
    "deep block": "- " * 50_000 + "x",
    "deep keys": "? " * 50_000,
    "tabs": "\t\t: :\n -",
    "endless alias": "a: &a\n  b: *a",
    "binary": "\x00\x01",
    "long": "x: 1\n" * 60_000,
    "no keys": "just text",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_ends(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    try:
        assert len(read_launch(path).flags) <= 5_000
    except DataError as error:
        assert error.why and error.mend
    assert not (tmp_path / "hacked").exists()


def test_yaml_faults_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1\nseed: [1,\n")
    with pytest.raises(DataError, match="at line"):
        read_launch(path)
