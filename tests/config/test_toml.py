"""TOML files, and that a printed configuration gives itself again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config import (
    MANY,
    PRESETS,
    InvalidConfigError,
    Option,
    RunConfig,
    from_dict,
    load_toml,
    options,
    parse_args,
    to_dict,
    to_toml,
    with_values,
)
from redline.config.layers import Layer, merge
from redline.config.toml import read_layer

SHAPE = "num_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\ntrain_iters = 5\n"


def load(tmp_path: Path, text: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_toml(file).config


def problems(tmp_path: Path, text: str) -> dict[str, str]:
    with pytest.raises(InvalidConfigError) as caught:
        load(tmp_path, text)
    return {problem.rule: f"{problem.what} {problem.why} {problem.mend}" for problem in caught.value.problems}


def test_sections_flat_keys_and_switches(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SHAPE + "swiglu = true\nno_save_optim = true\nlr = 1\n"
        'data_path = [0.3, "a", 0.7, "b"]\nkv_channels = "none"\n'
        '[model]\nnormalization = "RMSNorm"\ndisable_bias_linear = true\n'
        '[train]\nglobal_batch_size = 4\nrampup_batch_size = [1, 1, 8]\n[logging]\ntensorboard_dir = "t"\n',
    )
    assert config.model.activation_func == "swiglu"
    assert not config.model.add_bias_linear
    assert not config.checkpoint.save_optim
    assert type(config.optim.lr) is float
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.train.rampup_batch_size == (1, 1, 8)
    assert config.logging.tensorboard_dir == "t"
    assert config.model.kv_channels is None


def test_one_value_is_a_list_of_one(tmp_path: Path) -> None:
    assert load(tmp_path, SHAPE + 'data_path = "a"').data.data_path == ("a",)


@pytest.mark.parametrize(
    ("text", "rule", "said"),
    [
        ("hiden_size = 1", "unknown-key", "did you mean hidden_size?"),
        ("[model]\nhiden_size = 1", "unknown-key", "there is no key model.hiden_size."),
        ("[modle]\nhidden_size = 1", "unknown-key", "did you mean model?"),
        ("[train]\nhidden_size = 1", "wrong-section", "move it to [model]."),
        ("swiglu = false", "bad-value", "swiglu must be true."),
        ("seed = true", "bad-value", "must be a whole number"),
        ('seed = "1"', "bad-value", "must be a whole number"),
        ("bf16 = 1", "bad-value", "must be true or false"),
        ("bf16 = 'yes'", "bad-value", "must be true or false"),
        ("lr = inf", "bad-value", "must be finite"),
        ("save = 3", "bad-value", "must be text"),
        ("rampup_batch_size = [1, 2]", "bad-value", "must have 3 values"),
        ("data_path = [[1]]", "bad-value", "must be text"),
        ("swiglu = true\nactivation_func = 'geglu'", "one-spelling", "keep one of them"),
        ("seed = 2020-01-01", "bad-value", "must be a whole number"),
        ("seed = ", "config-file", "is not a TOML file"),
        (
            "fp8_recipe = 'custom'\nfp8_format = 'e4m3'",
            "not-in-redline/custom-recipe",
            "use --fp8-recipe delayed, tensorwise",
        ),
        ("[model.deep]\nx = 1", "unknown-key", "there is no key model.deep."),
    ],
)
def test_mistakes(tmp_path: Path, text: str, rule: str, said: str) -> None:
    text = text if text.startswith("[") else SHAPE + text
    assert said in problems(tmp_path, text)[rule]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('train_iters = "3"', 'train_iters = "3": the value must be a whole number. '),
        ('[train]\ntrain_iters = "3"', 'train.train_iters = "3": the value must be a whole number. '),
        ('bf16 = "true"', 'bf16 = "true": the value must be true or false. '),
        (
            'rampup_batch_size = [1, "2", 3]',
            'rampup_batch_size = [1, "2", 3]: the value',
        ),
    ],
)
def test_a_bad_value_is_shown_as_the_file_has_it(tmp_path: Path, text: str, shown: str) -> None:
    """Its quotes may be all that is wrong; the example is one for the file, too."""
    said = problems(tmp_path, text)["bad-value"]
    assert said.startswith(shown) and "--" not in said
    assert "for example train_iters = " in said or "train_iters" not in text


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfigError, match="is not a TOML file"):
        load_toml(file)
    with pytest.raises(InvalidConfigError, match="Is a directory"):
        load_toml(tmp_path)


def reloaded(config: RunConfig) -> RunConfig:
    """`config` through its own TOML, rules aside."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        layer = read_layer(file)
    assert layer.problems == []
    preset = layer.values.get("preset")
    return with_values(RunConfig(), merge(PRESETS.get(preset, {}), layer.values, Layer().values))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_round_trip(tmp_path: Path, preset: str) -> None:
    words = ["--preset", preset] + ([] if preset == "demo" else ["--train-iters", "5"])
    config = parse_args(words).config
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load_toml(file).config == config
    assert parse_args([str(file)]).config == config


def test_overridden_preset_round_trips(tmp_path: Path) -> None:
    """A value that the preset sets and a flag unsets must not come back."""
    words = "--preset llama3.2-1b --train-iters 5 --no-use-rope-scaling --no-group-query-attention"
    config = parse_args([*words.split(), "--ffn-hidden-size", "none"]).config
    assert config.model.ffn_hidden_size is None
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load_toml(file).config == config


TEXT = st.text(st.characters(exclude_categories=("C", "Zl", "Zp", "Zs")), min_size=1, max_size=8).filter(
    lambda t: t != "none"
)


def values_of(option: Option) -> st.SearchStrategy[Any]:
    """Well-formed values of an option."""
    spec = option.spec
    if option.kind is bool:
        one: st.SearchStrategy[Any] = st.booleans()
    elif option.field == "preset":
        one = st.sampled_from(sorted(PRESETS))
    elif option.choices:
        one = st.sampled_from(option.choices)
    elif option.kind is str:
        one = TEXT
    else:
        least = spec.at_least if spec.at_least is not None else spec.more_than
        most = spec.at_most if spec.at_most is not None else spec.less_than
        if option.kind is int:
            one = st.integers(int(least or 0), int(most) if most is not None else 10**12)
        else:
            one = st.floats(
                least or 0.0,
                most,
                exclude_min=spec.more_than is not None,
                exclude_max=spec.less_than is not None,
                allow_nan=False,
                allow_infinity=False,
            )
    if option.count == MANY:
        one = st.lists(one, max_size=3).map(tuple)
    elif option.count > 1:
        one = st.tuples(*[one] * option.count)
    return st.none() | one if option.optional else one


SETTINGS = st.lists(st.sampled_from(options()), max_size=12, unique=True).flatmap(
    lambda chosen: st.fixed_dictionaries({option.field: values_of(option) for option in chosen})
)


@given(SETTINGS)
@settings(max_examples=120, derandomize=True, deadline=None)
def test_any_configuration_round_trips(values: dict[str, Any]) -> None:
    """Exactly: floats to the last bit, every string, unset values, whatever the preset sets."""
    config = with_values(RunConfig(), values)
    assert reloaded(config) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_from_dict_reads_other_releases() -> None:
    values = to_dict(RunConfig())
    values["train"]["of_tomorrow"] = 1
    del values["train"]["seed"], values["logging"]
    assert from_dict(values) == RunConfig()


def test_toml_states_active_options_and_no_default_of_refused_ones() -> None:
    text = to_toml(parse_args([]).config)
    assert "init_method_std = 0.02" in text
    assert "pipeline_model_parallel_size" not in text
    refused = parse_args(["--pipeline-model-parallel-size", "2"], training=False).config
    assert "pipeline_model_parallel_size = 2" in to_toml(refused)
