"""No option is ignored: each acts, or is refused by a named rule, or is said to be built in."""

from __future__ import annotations

import shlex

import pytest

from redline.config import (
    InvalidConfigError,
    Option,
    RunConfig,
    check,
    notices,
    options,
    parse_args,
    with_values,
)

REFUSED = [option for option in options() if option.state == "refused"]
BUILT_IN = [option for option in options() if option.state == "built-in"]
CHOICES = [(option, choice) for option in options() for choice in option.spec.refused]
TRAINABLE = with_values(RunConfig(), {"train_iters": 5})


def flag(option: object) -> str:
    return option.flag if isinstance(option, Option) else str(option)


def rules_of(config: RunConfig) -> dict[str, tuple[str, ...]]:
    with pytest.raises(InvalidConfigError) as caught:
        check(config)
    assert all(problem.what and problem.why and problem.mend for problem in caught.value.problems)
    return {problem.rule: problem.flags for problem in caught.value.problems}


def test_every_refused_option_is_refused_by_parsing_with_its_rule() -> None:
    assert len(REFUSED) > 50
    for option in REFUSED:
        assert option.spec.waits_for is not None
        with pytest.raises(InvalidConfigError) as caught:
            parse_args(shlex.split(option.show(option.another_value())))
        found = [problem for problem in caught.value.problems if problem.rule == option.spec.waits_for.rule]
        assert [option.flag] in [list(problem.flags) for problem in found], option.flag
        assert f"rule: {option.spec.waits_for.rule}" in str(caught.value)


def test_every_value_of_a_refused_option_is_refused() -> None:
    for option in REFUSED:
        values = option.choices if option.choices and option.count == 1 else [option.another_value()]
        for value in values:
            if value != option.default:
                rules_of(with_values(TRAINABLE, {option.field: value}))


@pytest.mark.parametrize(("option", "choice"), CHOICES, ids=flag)
def test_refused_choice_of_an_active_option(option: Option, choice: object) -> None:
    found = rules_of(with_values(TRAINABLE, {option.field: choice}))
    assert option.spec.refused[choice].rule in found


@pytest.mark.parametrize("option", BUILT_IN, ids=flag)
def test_built_in_is_accepted_and_said_once_and_the_contrary_refused(option: Option) -> None:
    assert option.kind is bool and option.default is None
    for value in (True, False):
        config = with_values(TRAINABLE, {option.field: value})
        if value in option.spec.already:
            check(config)
            assert len(notices(config)) == 1
            assert notices(config)[0].startswith(f"built in: {option.show(value)}: ")
        else:
            assert f"built-in/{option.flag[2:]}" in rules_of(config)
    assert notices(TRAINABLE) == []


def test_what_happens_anyway_is_accepted_and_said() -> None:
    """Megatron scripts that switch a fusion or an overlap off ask for what this release does."""
    config = parse_args(["--no-fused-residual-rmsnorm", "--no-data-sharding"]).config
    assert len(notices(config)) == 1  # the first is the default of an option that acts
    with pytest.raises(InvalidConfigError, match="not-in-redline/data-sharding"):
        parse_args(["--data-sharding"])


def test_never_and_not_yet_are_told_apart() -> None:
    with pytest.raises(InvalidConfigError, match=r"--use-megatron-fsdp is not part of Redline\."):
        parse_args(["--use-custom-fsdp"])
    with pytest.raises(InvalidConfigError, match=r"--fp4-format e2m1 is not available yet\."):
        parse_args(["--fp4-format", "e2m1"])
    with pytest.raises(InvalidConfigError, match="not-in-redline/optimizers"):
        parse_args(["--optimizer", "sgd"])


def test_active_options_act_at_their_other_value_or_break_a_named_rule() -> None:
    for option in options():
        all_refused = len(option.obeyed_choices) == 1
        if option.state == "active" and not all_refused:
            config = with_values(TRAINABLE, {option.field: option.another_value()})
            try:
                check(config)
            except InvalidConfigError as error:
                assert all(problem.rule for problem in error.problems)
                assert not any(problem.rule.startswith("not-") for problem in error.problems), option.flag
