"""The tree as a whole: names, types, spellings, states; and what importing it costs."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from redline.config import (
    MANY,
    SECTIONS,
    UNSET,
    RunConfig,
    differing,
    needed_by,
    options,
    value_of,
    with_values,
)
from redline.config.flags import Section
from redline.config.layers import Layer, merge
from redline.config.parse import read_words
from redline.config.rules import violations
from redline.config.tree import options_by_field, spellings

FLAGS = Path(__file__).with_name("flags.txt")


def test_flag_list_is_the_committed_one() -> None:
    """A new or lost spelling is a decision, not an accident."""
    assert FLAGS.read_text().split() == sorted(spellings())


def test_sections_are_the_agreed_ones_and_named_after_their_fields() -> None:
    wanted = "model moe mtp data tokenizer train optim parallel overlap kernels attention recompute precision"
    assert set(SECTIONS) == {*wanted.split(), "compile", "runtime", "checkpoint", "logging"}
    assert {option.section for option in options()} == set(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS.values())
def test_every_attribute_is_annotated_and_every_field_is_an_option(section: type[Section]) -> None:
    """A class attribute without annotation would be no field, and silently no option."""
    names = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    public = {name for name in vars(section) if not name.startswith("_")} - {"title", "account"}
    assert public == names
    assert all("flag" in field.metadata for field in dataclasses.fields(section))  # type: ignore[arg-type]


def test_defaults_and_other_values_fit() -> None:
    for option in options():
        other = option.another_value()
        assert option.fault(option.default) == option.fault(other) == "", option.flag
        assert other != option.default, option.flag
        assert option.state in ("active", "refused", "built-in")
        assert option.refusal(option.default) is None, option.flag


def test_facts_of_options_hold_together() -> None:
    names = {option.field for option in options()}
    for option in options():
        assert option.spec.help.endswith("."), option.flag
        assert option.spec.needs.keys() <= names, option.flag
        assert option.account in ("", "kernels", "communication", "memory", "host")
        assert not (option.spec.built_in and option.spec.waits_for), option.flag
        if option.spec.excludes:
            group = [other for other in options() if other.spec.excludes == option.spec.excludes]
            assert len(group) > 1, option.flag


def test_every_form_of_a_switch_means_what_it_says() -> None:
    """--x is true; --no-x and --disable-x are false, aliases included: each of them, through the parser."""
    switches = [
        (name, spelling.option) for name, spelling in spellings().items() if spelling.option.kind is bool
    ]
    assert len(switches) > 250
    for name, option in switches:
        negated = name.startswith(("--no-", "--disable-"))
        needs = [word for field, value in needed_by(option).items() for word in _words(field, value)]
        layer = Layer()
        assert read_words([*needs, name], layer) == []
        assert layer.problems == []
        assert layer.values[option.field] is not negated, name
        config = with_values(RunConfig(), merge({}, {}, layer.values))
        assert value_of(config, option.field) is not negated, name


def _words(field: str, value: object) -> list[str]:
    return shlex.split(options_by_field()[field].show(value))


def test_an_option_beside_what_it_needs_has_an_effect() -> None:
    for option in options():
        values = {**needed_by(option), option.field: option.another_value()}
        broken = violations(with_values(RunConfig(), values))
        assert f"needs/{option.flag[2:]}" not in {problem.rule for problem in broken}, option.flag


def test_switches_have_all_their_forms() -> None:
    known = spellings()
    for option in options():
        if option.kind is bool:
            forms = [f"--no-{option.flag[2:]}"]
            forms += [f"--disable-{option.flag[2:]}"] if option.default is not False else []
            assert option.flag in known
            assert all(known[form].constant is False and known[form].option is option for form in forms)


ALIASES = {
    "--fp8": ("fp8_format", "hybrid"),
    "--fp8-hybrid": ("fp8_format", "hybrid"),
    "--fp8-e4m3": ("fp8_format", "e4m3"),
    "--swiglu": ("activation_func", "swiglu"),
    "--squared-relu": ("activation_func", "squared-relu"),
    "--quick-geglu": ("activation_func", "quick-geglu"),
    "--geglu": ("activation_func", "geglu"),
    "--gelu-exact": ("activation_func", "gelu"),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-flash-attn": ("attention_backend", "flash"),
    "--cuda-graph": ("cuda_graph_impl", "local"),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--no-bias-gelu-fusion": ("bias_gelu_fusion", False),
    "--no-save-optim": ("save_optim", False),
    "--no-load-rng": ("load_rng", False),
    "--override-opt_param-scheduler": ("override_opt_param_scheduler", True),
    "--override-opt-param-scheduler": ("override_opt_param_scheduler", True),
    "--use-checkpoint-opt_param-scheduler": ("use_checkpoint_opt_param_scheduler", True),
    "--no-overlap-p2p-communication": ("overlap_p2p_communication", False),
    "--no-fp8-wgrad": ("fp8_wgrad", False),
    "--disable-jit-fuser": ("jit_fuser", False),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_loss_and_grad", False),
    "--disable-tp-comm-overlap-ag": ("tp_comm_overlap_ag", False),
    "--persistent-save-interval": ("save_interval", UNSET),
    "--layernorm-epsilon": ("norm_epsilon", UNSET),
}


@pytest.mark.parametrize(("name", "meaning"), ALIASES.items())
def test_megatron_spellings(name: str, meaning: tuple[str, object]) -> None:
    spelling = spellings()[name]
    assert (spelling.option.field, spelling.constant) == meaning


def test_types_are_read_from_annotations() -> None:
    table = {option.field: option for option in options()}
    assert (table["hidden_size"].kind, table["hidden_size"].count) == (int, 1)
    assert (table["rampup_batch_size"].kind, table["rampup_batch_size"].count) == (int, 3)
    assert (table["data_path"].kind, table["data_path"].count) == (str, MANY)
    assert table["flash_attention_version"].choices == (2, 3, 4)
    assert table["overlap_grad_reduce"].optional
    assert table["recompute_modules"].choices[:2] == ("core_attn", "layernorm")


def test_sections_are_frozen_and_check_their_values() -> None:
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 1  # type: ignore[misc]
    with pytest.raises(Exception, match="--hidden-size -1: the value must be at least 1"):
        dataclasses.replace(config.model, hidden_size=-1)
    assert hash(config) == hash(RunConfig())
    assert list(differing(config, dataclasses.replace(config))) == []


def test_importing_options_imports_nothing_heavy() -> None:
    """Help and parsing answer at once, also where torch is absent."""
    code = (
        "import sys; from redline.config import format_help, parse_args, to_toml; "
        "config = parse_args(['--preset', 'llama3-8b', '--train-iters', '1']).config; "
        "format_help(short=False); to_toml(config); "
        "heavy = ('torch', 'pydantic', 'rich', 'numpy', 'argparse', 'difflib'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
