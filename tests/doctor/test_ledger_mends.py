"""The ledger names checks by id, as data; every one of them exists."""

import pytest

from redline.doctor import CHECKS
from redline.ledger import CAUSES


@pytest.mark.parametrize("key", CAUSES)
def test_every_mend_of_the_ledger_is_a_check(key) -> None:
    assert set(CAUSES[key].mends) <= {each.id for each in CHECKS}


def test_every_cause_but_the_unknown_has_a_mend() -> None:
    assert [key for key, cause in CAUSES.items() if not cause.mends] == ["unknown"]
