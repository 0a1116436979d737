"""The command line: words to values, layers, and every mistake reported with its mend."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config import UNSET, InvalidConfigError, Parsed, RunConfig, parse_args
from redline.config.flags import show_value
from redline.config.layers import Layer
from redline.config.parse import read_words
from redline.config.tree import spellings
from redline.errors import ConfigError

TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 5"


def parse(text: str) -> RunConfig:
    return parse_args(shlex.split(text)).config


def problems(text: str, *, training: bool = True) -> dict[str, str]:
    """rule -> what of everything that is wrong with a command line."""
    with pytest.raises(InvalidConfigError) as caught:
        parse_args(shlex.split(text), training=training)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2
    return {problem.rule: f"{problem.what} {problem.why} {problem.mend}" for problem in caught.value.problems}


def test_nothing_is_the_demo() -> None:
    parsed = parse_args([])
    assert parsed.config.model.preset == "demo"
    assert parsed.explicit == frozenset()


def test_values_and_what_was_stated() -> None:
    words = (
        f"{TINY} --lr 1e-3 --data-path 0.3 a 0.7 b --bf16 --no-async-save --rampup-batch-size 1 1 9 "
        "--global-batch-size=3"
    )
    parsed = parse_args(shlex.split(words))
    config = parsed.config
    assert config.model.preset is None
    assert (config.model.hidden_size, config.optim.lr) == (64, 1e-3)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.train.rampup_batch_size == (1, 1, 9)
    assert config.precision.bf16 and not config.checkpoint.async_save
    assert parsed.explicit == {
        *(
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "train_iters",
            "lr",
            "data_path",
            "bf16",
            "async_save",
        ),
        *("rampup_batch_size", "global_batch_size"),
    }


def test_last_value_counts_and_none_unsets() -> None:
    config = parse(
        f"{TINY} --seed 1 --seed 2 --bf16 --no-bf16 --save a --save none --kv-channels 8 --kv-channels none"
    )
    assert config.train.seed == 2
    assert not config.precision.bf16
    assert config.checkpoint.save is None
    assert config.model.kv_channels is None


def test_several_values_of_one_option_are_said() -> None:
    """As argparse has it the last counts, of a list too; the same value again is worth no word."""
    words = (
        f"{TINY} --lr 1 --lr 2 --lr 3 --seed 4 --seed 4 --bf16 --no-bf16 --bf16 --fp8-format e4m3 "
        "--fp8-keep-bf16 layers.0.* --fp8-keep-bf16 *.fc1 *.fc2"
    )
    parsed = parse_args(words.split())
    assert parsed.config.precision.fp8_keep_bf16 == ("*.fc1", "*.fc2")
    assert parsed.notices == (
        "--lr is given 3 times: --lr 1, then --lr 2, then --lr 3. The last one counts.",
        "--bf16 is given 3 times: --bf16, then --no-bf16, then --bf16. The last one counts.",
        "--fp8-keep-bf16 is given twice: --fp8-keep-bf16 layers.0.*, then --fp8-keep-bf16 *.fc1 *.fc2. "
        "The last one counts; several values follow one flag.",
    )
    assert parse_args(TINY.split()).notices == ()


def test_negative_numbers_are_values() -> None:
    assert "bad-value" in problems(f"{TINY} --lr -1e-3")
    assert "--lr -0.001: the value must be at least 0." in problems(f"{TINY} --lr -1e-3")["bad-value"]


@pytest.mark.parametrize(
    ("words", "rule", "said"),
    [
        ("--hiden-size 64", "unknown-flag", "did you mean --hidden-size?"),
        ("--hidden_size 64", "unknown-flag", "did you mean --hidden-size?"),
        ("--recompute-activation", "unknown-flag", "did you mean --recompute-activations?"),
        ("--train-iter 5", "unknown-flag", "did you mean --train-iters?"),
        ("--zzz", "unknown-flag", "--help-all lists every flag."),
        ("--hid 64", "unknown-flag", "there is no flag --hid."),
        ("-x", "unknown-flag", "there is no flag -x."),
        ("hidden-size 64", "stray-word", "did you mean --hidden-size?"),
        ("--bf16 true", "stray-word", "--bf16 is a switch and takes no value."),
        ("--bf16=true", "takes-no-value", "write --bf16 alone."),
        ("--seed 1 2", "stray-word", "'2' belongs to no flag"),
        ("--seed", "needs-value", "--seed needs 1 value and has 0."),
        ("--seed --bf16", "needs-value", "--seed needs 1 value and has 0."),
        ("--data-path", "needs-value", "at least one value"),
        ("--rampup-batch-size 1 2", "needs-value", "needs 3 values and has 2"),
        ("--seed x", "bad-value", "--seed x: the value must be a whole number."),
        ("--seed 1.5", "bad-value", "must be a whole number"),
        ("--lr fast", "bad-value", "--lr fast: the value must be a number."),
        ("--lr nan", "bad-value", "must be finite"),
        ("--lr inf", "bad-value", "must be finite"),
        ("--hidden-dropout 1", "bad-value", "must be less than 1"),
        ("--rotary-percent 0", "bad-value", "must be more than 0"),
        ("--rotary-percent 1.5", "bad-value", "must be at most 1"),
        ("--micro-batch-size 0", "bad-value", "must be at least 1"),
        ("--seed none", "bad-value", "must be a whole number"),
        ("--save ''", "bad-value", "not empty"),
        ("--lr-decay-style linaer", "bad-value", "must be one of linear, cosine"),
        ("--preset lama3-8b", "unknown-preset", "did you mean llama3-8b?"),
        ("--num-layers 4", "shape-stated", "--hidden-size and --num-attention-heads not given"),
        ("--swiglu --squared-relu", "one-spelling", "--swiglu and --squared-relu ask for different values"),
        ("--swiglu --activation-func geglu", "one-spelling", "--swiglu means --activation-func swiglu"),
        ("--fp8 --fp8-format e4m3", "one-spelling", "--fp8-format e4m3"),
        ("absent.toml", "config-file", "No such file"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_mend(words: str, rule: str, said: str) -> None:
    assert said in problems(words)[rule]


def test_two_config_files(tmp_path: Path) -> None:
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("")
    assert "one-config-file" in problems(f"{tmp_path}/a.toml {tmp_path}/b.toml")


def test_everything_wrong_is_said_at_once() -> None:
    found = problems(
        f"{TINY} --num-attention-heads 5 --hiden-size 8 --fp4-format e2m1 --lr x --bf16 --fp16 word "
        "--train-samples 3"
    )
    assert found.keys() == {
        *("unknown-flag", "bad-value", "stray-word", "not-available-yet/fp4", "one-of/precision"),
        *("one-of/length",),
    }  # heads and hidden size: --hidden-size may be what --hiden-size meant


def test_a_rule_about_a_flag_already_complained_of_is_left_out() -> None:
    assert problems("--preset llama3-8b --train-iter 5").keys() == {"unknown-flag"}
    assert problems(f"{TINY} --pipeline-model-parallel-size 3").keys() == {
        "not-available-yet/pipeline-parallel"
    }


def test_error_reads_as_what_why_mend() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        parse_args(shlex.split(f"{TINY} --num-attention-heads 5"))
    assert str(caught.value).splitlines() == [
        "ConfigError: --num-attention-heads 5 does not divide --hidden-size 64.",
        "  why:  without --kv-channels each head has hidden_size / num_attention_heads channels.",
        "  mend: use 2 or 4 or 8 or 16 heads, or state --kv-channels.",
        "  rule: heads-divide-hidden",
    ]
    assert caught.value.what.startswith("--num-attention-heads 5")


def test_layers(tmp_path: Path) -> None:
    """Preset < file < flags."""
    file = tmp_path / "run.toml"
    file.write_text('preset = "llama3-8b"\n[model]\nnum_layers = 8\n[train]\ntrain_iters = 7\nseed = 5\n')
    parsed = parse_args([str(file), "--seed", "6", "--bf16"])
    config = parsed.config
    assert (config.model.hidden_size, config.model.num_layers) == (4096, 8)
    assert (config.train.train_iters, config.train.seed, config.precision.bf16) == (7, 6, True)
    assert parsed.explicit == {"preset", "num_layers", "train_iters", "seed", "bf16"}
    assert parse_args([str(file), "--preset", "gpt2-124m"]).config.model.hidden_size == 768


def test_a_config_file_is_no_data_path(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\ntrain_iters = 7\n")
    assert parse_args(["--data-path", "a", str(file)]).config.data.data_path == ("a",)
    assert parse_args(["--save", "odd.toml", str(file)]).config.checkpoint.save == "odd.toml"


def test_a_stronger_layer_takes_rivals_and_dependents_with_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("bf16 = true\ngrad_reduce_in_bf16 = true\n")
    config = parse_args([str(file), "--fp16"]).config
    assert (config.precision.bf16, config.precision.fp16) == (False, True)
    assert not config.precision.grad_reduce_in_bf16, "it needs bf16, which --fp16 replaced"
    config = parse_args(["--train-samples", "64"]).config
    assert (config.train.train_iters, config.train.train_samples) == (None, 64), "the demo's length gives way"
    config = parse("--preset llama3.2-1b --train-iters 5 --no-use-rope-scaling")
    assert config.model.rope_scaling_factor == 8.0
    config = parse("--preset qwen3-8b --train-iters 5 --position-embedding-type none")
    assert config.model.rotary_base == 10000.0
    config = parse("--preset llama3-8b --train-iters 5 --no-group-query-attention")
    assert config.model.num_query_groups is None


def test_within_one_layer_a_missing_need_is_a_mistake() -> None:
    assert problems(f"{TINY} --rope-scaling-factor 4").keys() == {"needs/rope-scaling-factor"}
    assert problems(f"{TINY} --add-qkv-bias")["needs/add-qkv-bias"].startswith(
        "--add-qkv-bias has no effect without --no-add-bias-linear."
    )


def test_planner_takes_what_training_refuses() -> None:
    words = shlex.split("--preset llama3-70b --tensor-model-parallel-size 8 --sequence-parallel --fp8")
    config = parse_args(words, training=False).config
    assert config.parallel.tensor_model_parallel_size == 8
    assert config.precision.fp8_format == "hybrid"
    with pytest.raises(InvalidConfigError):
        parse_args(words)


def test_checkpoint_args_need_no_shape() -> None:
    parsed = parse_args(shlex.split("--load run --use-checkpoint-args --train-iters 5"))
    assert parsed.config.model.preset is None


WORDS = st.sampled_from(
    [*spellings(), "1", "0.5", "-3", "none", "word", "x.y", "--", "-", "--=", "", "=", "--x=1"]
)


@given(st.lists(WORDS, max_size=8))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_any_words_parse_or_are_refused_in_words(words: list[str]) -> None:
    """No command line ends in anything but a configuration or an error that says what, why and mend."""
    try:
        parsed = parse_args(words, training=False)
    except InvalidConfigError as error:
        assert all(
            problem.what and problem.why and problem.mend and problem.rule for problem in error.problems
        )
    else:
        assert isinstance(parsed, Parsed)


def test_another_value_survives_being_typed() -> None:
    """What errors and docs show is what can be typed, for every option with a value and all its spellings."""
    for name, spelling in spellings().items():
        option, value, words = spelling.option, spelling.constant, [name]
        if value is UNSET:
            value = option.another_value()
            words += shlex.split(show_value(value))
        layer = Layer()
        assert read_words(words, layer) == []
        assert layer.problems == []
        assert layer.values == {option.field: value}
