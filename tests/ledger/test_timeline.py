"""Each instant has one owner, and the parts sum to the window exactly."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.ledger.timeline import NOBODY, cut, layer, nested, union

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


def layer_of(spans):
    return layer([a for a, _ in spans], [a + d for a, d in spans], list(range(len(spans))))


def owner_at(spans, instant):
    """Of those that cover it, the one that began first (on a tie the longer)."""
    covering = [
        (start, -length, index)
        for index, (start, length) in enumerate(spans)
        if start <= instant < start + length
    ]
    return min(covering)[2] if covering else NOBODY


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=3), st.integers(0, 30), st.integers(1, 60))
def test_every_instant_has_the_owner_that_the_rule_gives_it(layers, start, length) -> None:
    pieces = cut(start, start + length, [layer_of(spans) for spans in layers])
    assert pieces.lengths.sum() == length
    assert (pieces.lengths > 0).all()
    for instant in range(start, start + length):
        at = int(np.searchsorted(pieces.starts, instant, side="right")) - 1
        expected = next(
            (
                (which, owner)
                for which, spans in enumerate(layers)
                if (owner := owner_at(spans, instant)) >= 0
            ),
            (NOBODY, NOBODY),
        )
        assert (pieces.layers[at], pieces.owners[at]) == expected


def test_an_earlier_layer_takes_precedence_and_the_rest_is_nobodys() -> None:
    compute, collective = layer_of([(10, 20)]), layer_of([(0, 40)])
    pieces = cut(0, 50, [compute, collective])
    assert pieces.owned(0, 1).tolist() == [20]
    assert pieces.owned(1, 1).tolist() == [20]
    assert pieces.lengths[pieces.layers == NOBODY].sum() == 10


def test_of_nested_spans_the_innermost_owns_the_time() -> None:
    #      0        10        20        30        40
    # a    [------------------------------]
    # b         [---------]     [---]
    # c            [--]
    # d                                        [--]
    starts, ends = [0, 5, 8, 20, 36], [30, 15, 10, 24, 39]
    found = cut(0, 40, [nested(starts, ends)]).owned(0, 5)
    assert found.tolist() == [30 - 10 - 4, 10 - 2, 2, 4, 3]


def test_union_joins_spans_that_touch() -> None:
    found = union([5, 0, 10, 30], [10, 6, 12, 31])
    assert found.starts.tolist() == [0, 30] and found.ends.tolist() == [12, 31]
