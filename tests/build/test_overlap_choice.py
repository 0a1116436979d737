"""What `--tp-comm-overlap-method auto` makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from redline.build.tensor_parallel import _choose
from redline.comm.linked_gemm import Chunked, Plain
from redline.comm.measure import Timing
from redline.comm.pushed import Pushed

PIECES, WHOLE = Chunked(2), Plain()
AREA: Any = None  # nothing is sent
PUSHED = Pushed(AREA, 1)


@pytest.mark.parametrize(
    ("pieces_ms", "taken"), [(0.5, "chunked (2)"), (0.89, "chunked (2)"), (0.91, "plain"), (1.5, "plain")]
)
def test_plain_stays_where_little_would_be_won(pieces_ms: float, taken: str) -> None:
    """What a method launches more costs a host that is not ahead, which no timing of GEMMs alone shows."""
    timings = sorted((Timing(PIECES, pieces_ms), Timing(WHOLE, 1.0)), key=lambda each: each.ms)
    provider, name, why = _choose([PIECES, WHOLE], lambda _: timings)
    assert name == taken == provider.name
    assert f"chunked (2) {pieces_ms:.2f} ms" in why and "plain 1.00 ms" in why


def test_what_is_pushed_needs_no_margin() -> None:
    """It launches hardly more."""
    timings = [Timing(PIECES, 0.95), Timing(PUSHED, 0.97), Timing(WHOLE, 1.0)]
    assert _choose([PIECES, PUSHED, WHOLE], lambda _: timings)[:2] == (PUSHED, "pushed")


def test_nothing_is_compared_where_one_is_left() -> None:
    assert _choose([PIECES], "unused")[2] == "asked for by name"
    assert _choose([], "unused")[1:] == ("plain", "switched off")
