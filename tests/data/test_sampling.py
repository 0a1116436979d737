"""Document, sample and shuffle index: golden sequences and a plain loop over documents as the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data.sampling import SampleOrder, build_sample_order, plan_epochs
from redline.data.split import parse_split, split_ranges
from redline.errors import ConfigError

LENGTHS = np.array([5, 3, 9, 4, 7, 2], np.int32)


def order_of(lengths: np.ndarray, seq_length: int, num_samples: int | None, **kwargs: int) -> SampleOrder:
    first, last = kwargs.get("first", 0), kwargs.get("last", len(lengths))
    return build_sample_order(
        lengths,
        range(first, last),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=kwargs.get("seed", 1234),
    )


def reference_order(
    lengths: list[int], documents: list[int], seq_length: int, num_samples: int | None, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """The same indices by walking the stream token by token; written for clarity only."""
    tokens = sum(lengths[d] for d in documents)
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    total = (epochs * tokens - 1) // seq_length
    together = total
    if epochs > 1:
        without_last = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - without_last < int(0.80 * ((tokens - 1) // seq_length)):
            together = without_last
    random = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values, dtype=np.int64)
        random.shuffle(array)
        return array.tolist()

    if together < total:
        order = shuffled(documents * (epochs - 1)) + shuffled(documents)
    else:
        order = shuffled(documents * epochs)
    stream = [(place, offset) for place, d in enumerate(order) for offset in range(lengths[d])]
    starts = [(0, 0)] + [stream[k * seq_length] for k in range(1, total + 1)]
    shuffle = shuffled(list(range(together)))
    if together < total:
        shuffle += shuffled(list(range(together, total)))
    return order, starts, shuffle


@pytest.mark.parametrize("num_samples", [5, 7])
def test_golden_one_epoch(num_samples: int) -> None:
    order = order_of(LENGTHS, 4, num_samples)
    assert order.num_epochs == 1
    assert order.document_index.tolist() == [2, 1, 5, 0, 4, 3]
    assert order.sample_index.tolist() == [
        [0, 0],
        [0, 4],
        [0, 8],
        [2, 0],
        [3, 2],
        [4, 1],
        [4, 5],
        [5, 2],
    ]
    assert order.shuffle_index.tolist() == [5, 0, 3, 4, 2, 6, 1]
    assert (order.document_index.dtype, order.sample_index.dtype) == (np.int32, np.int32)
    assert order.shuffle_index.dtype == np.uint32


def test_golden_three_epochs_with_a_separate_last_one() -> None:
    order = order_of(LENGTHS, 4, 16)
    assert order.num_epochs == 3
    assert order.document_index.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3, 1, 0, 3, 2, 5, 4]
    assert order.sample_index[:5].tolist() == [[0, 0], [1, 1], [1, 5], [2, 0], [3, 2]]
    assert len(order.sample_index) == 23
    assert order.shuffle_index.tolist() == [
        *(7, 4, 1, 11, 3, 10, 2, 13, 6, 9, 12, 5, 0, 8),
        *(18, 21, 15, 14, 19, 17, 16, 20),
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    seq_length=st.integers(1, 20),
    num_samples=st.none() | st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_loop_over_documents(
    lengths: list[int], seq_length: int, num_samples: int | None, seed: int
) -> None:
    """Any lengths (empty documents too), sizes and seeds: the vectorised order is the loop's."""
    order = order_of(np.array(lengths, np.int32), seq_length, num_samples, seed=seed)
    documents, starts, shuffle = reference_order(
        lengths, list(range(len(lengths))), seq_length, num_samples, seed
    )
    assert order.document_index.tolist() == documents
    assert order.sample_index.tolist() == [list(start) for start in starts]
    assert order.shuffle_index.tolist() == shuffle


def test_a_range_of_documents_keeps_their_numbers() -> None:
    order = order_of(LENGTHS, 2, 40, first=2, last=5)
    reference = reference_order(LENGTHS.tolist(), [2, 3, 4], 2, 40, 1234)
    assert order.document_index.tolist() == reference[0]
    assert set(order.document_index.tolist()) == {2, 3, 4}
    assert order.shuffle_index.tolist() == reference[2]


def test_sweep_of_sizes_b092() -> None:
    """B092: every combination builds, with floor((tokens * epochs - 1) / seq_length) samples."""
    for num_documents in range(1, 21):
        lengths = (np.arange(num_documents) * 7 % 11 + 1).astype(np.int32)
        tokens = int(lengths.sum())
        for seq_length in range(8, 65, 4):
            for epochs in range(1, 6):
                wanted = (tokens * epochs - 1) // seq_length
                order = order_of(lengths, seq_length, wanted)
                assert len(order) == (tokens * order.num_epochs - 1) // seq_length
                assert wanted <= len(order) and order.num_epochs <= epochs
                assert sorted(order.shuffle_index.tolist()) == list(range(len(order)))


def test_many_epochs_of_a_tiny_set() -> None:
    order = order_of(np.array([1, 2], np.int32), 16, 1000)
    assert order.num_epochs == 5334  # ceil(16001 / 3)
    assert len(order) >= 1000


def test_numbers_beyond_32_bits() -> None:
    """Token counts are 64 bits wide: 3 documents of 2^31 - 1 tokens, repeated."""
    lengths = np.full(3, 2**31 - 1, np.int32)
    order = order_of(lengths, 2**30, 12)
    tokens = 3 * (2**31 - 1)
    assert order.num_epochs == -(-(12 * 2**30 + 1) // tokens)
    start = order.sample_index.astype(object)  # Python integers
    places = [position * (2**31 - 1) + offset for position, offset in start]
    assert places == [k * 2**30 for k in range(len(order) + 1)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 10**13), seq_length=st.integers(1, 2**20), wanted=st.integers(0, 10**8))
def test_the_number_of_epochs_is_least(tokens: int, seq_length: int, wanted: int) -> None:
    plan = plan_epochs(tokens, seq_length, wanted)
    assert plan.num_epochs * tokens >= wanted * seq_length + 1 or plan.num_epochs == 1
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * tokens < wanted * seq_length + 1
    assert wanted <= plan.num_samples or plan.num_epochs == 1
    assert plan.before_last <= plan.num_samples


@pytest.mark.parametrize(
    ("text", "num", "want"),
    [
        ("969, 30, 1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("98,1,1", 3, [(0, 3), (3, 3), (3, 3)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("1/1", 5, [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to the even 2
        ("50 50 0", 7, [(0, 4), (4, 7), (7, 7)]),  # 3.5 rounds to the even 4
        ("0.8,0.1,0.1", 10, [(0, 8), (8, 9), (9, 10)]),
    ],
)
def test_split_rounding(text: str, num: int, want: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in split_ranges(parse_split(text), num)] == want


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1"])
def test_impossible_splits(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)
