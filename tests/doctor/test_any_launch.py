"""No launch makes the doctor stumble: any flags, any values, any device."""

import json

import pytest
from good_launch import GOOD, case_of, script
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config.tree import options
from redline.doctor import combined, diagnose, facts_of, patch_launch, sarif
from redline.hardware import SHEETS
from redline.report.doctor_text import document

NUMBERS = st.sampled_from(
    ("0", "1", "2", "3", "7", "8", "64", "100", "4096", "100000", "1e9", "-1", "$N", "x", "")
)
OTHERS = {option.flag: option for option in options() if option.flag not in GOOD}


@st.composite
def changes(draw: st.DrawFn) -> dict[str, str | None]:
    """Some good flags with odd values, and some others with a value of theirs."""
    found: dict[str, str | None] = {}
    for flag in draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=4, unique=True)):
        found[flag] = draw(NUMBERS) if GOOD[flag] is not None else None
    for flag in draw(st.lists(st.sampled_from(sorted(OTHERS)), max_size=6, unique=True)):
        option = OTHERS[flag]
        if option.kind is bool:
            found[flag] = None
        elif option.choices:
            found[flag] = str(draw(st.sampled_from(option.choices)))
        else:
            found[flag] = draw(NUMBERS)
    return found


@given(
    change=changes(),
    without=st.lists(st.sampled_from(sorted(GOOD)), max_size=8, unique=True),
    gpu=st.sampled_from([None, *(sheet.name for sheet in SHEETS)]),
    gpus=st.sampled_from((None, 1, 8, 60, 64, 1024)),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_launch(
    tmp_path_factory: pytest.TempPathFactory,
    change: dict[str, str | None],
    without: list[str],
    gpu: str | None,
    gpus: int | None,
) -> None:
    text = script(change, tuple(without))
    case = case_of(tmp_path_factory.mktemp("any"), text, gpu=gpu, gpus=gpus)
    found = diagnose(case)
    json.dumps(document(found), allow_nan=False)
    json.dumps(sarif(found.findings), allow_nan=False)
    assert set(facts_of(case)) == set(document(found)["facts"])
    if found.now is not None and found.after is not None and case.fits(found.now):
        assert found.after.tokens_per_s >= 0.999 * found.now.tokens_per_s
        assert case.fits(found.after)
    patch_launch(case, combined(found))
