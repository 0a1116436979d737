"""What the watchdog says where ranks stand: who is behind, and that nobody is where nobody is."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from redline.comm import Progress, Watchdog
from redline.errors import TrainingError

LIMIT_S, POLL_S = 0.3, 0.02


def last_words(*ranks: Progress) -> list[TrainingError]:
    """What each rank's watchdog ends with once nothing has happened for the limit."""
    store, said = dist.HashStore(), [list[TrainingError]() for _ in ranks]
    with ExitStack() as held:
        for rank, (progress, words) in enumerate(zip(ranks, said, strict=True)):
            watchdog = Watchdog(
                store,
                rank,
                len(ranks),
                progress,
                steady_s=LIMIT_S,
                patient_s=LIMIT_S,
                end=words.append,
                poll_s=POLL_S,
            )
            held.enter_context(watchdog)
        until = time.monotonic() + 20
        while not all(said) and time.monotonic() < until:
            time.sleep(POLL_S)
    assert all(said), "every rank ends"
    return [words[0] for words in said]


def at_step_2(*collectives: str) -> Progress:
    progress = Progress(step=2)
    progress.begins("microbatch 1 of 4")
    for each in collectives:
        progress.meets(each)
    return progress


def test_the_rank_that_has_not_come_to_the_collective_is_named() -> None:
    for error in last_words(at_step_2("tp all-reduce"), at_step_2()):
        assert "rank 1 at step 2, microbatch 1 of 4, is furthest behind" in error.what
        assert "the foremost is rank 0 at step 2, microbatch 1 of 4, tp all-reduce" in error.why


def test_b117_where_all_are_as_far_no_rank_is_accused_and_each_place_is_told() -> None:
    """As on GPUs whose hosts run ahead of them: the first rank was blamed, whoever hung."""
    for error in last_words(*(at_step_2("dp all-reduce of 1 KiB") for _ in range(3))):
        assert "no rank is behind" in error.what and "rank 0" not in error.what
        assert "ranks 0, 1, 2 at step 2, microbatch 1 of 4, dp all-reduce of 1 KiB" in error.why


def test_of_ranks_as_far_the_one_that_waits_for_none_is_looked_at_first() -> None:
    """Rank 1 has come to its second operation, the others to a collective."""
    other = at_step_2()
    other.begins("microbatch 2 of 4")
    for error in last_words(at_step_2("dp all-reduce"), other, at_step_2("dp all-reduce")):
        assert "rank 1 at step 2, microbatch 2 of 4, is furthest behind" in error.what


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), ": AssertionError"),
        (MemoryError(), ": MemoryError"),
        (ValueError("\ntorn\nat page 3"), ": ValueError: torn"),
    ],
    ids=["bare assert", "no memory", "text that begins with an empty line"],
)
def test_a_rank_whose_error_has_no_text_still_tells_the_others(error: Exception, said: str) -> None:
    """Looking for the first line of none raised IndexError in place of the report."""
    store = dist.HashStore()
    failed, other = (
        Watchdog(store, rank, 2, at_step_2(), steady_s=LIMIT_S, patient_s=LIMIT_S) for rank in range(2)
    )
    failed.report(error)
    told = other.lost()
    assert told is not None and told.what.endswith(said), told
    assert failed.explain(error).what == told.what


def test_a_collective_that_fails_without_a_text_is_explained() -> None:
    alone = Watchdog(None, 0, 1, at_step_2(), steady_s=LIMIT_S, patient_s=LIMIT_S)
    assert alone.explain(RuntimeError()).why == "RuntimeError"


def test_a_lost_store_is_told_whatever_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches must not die of it."""
    words: list[TrainingError] = []
    ended = threading.Event()

    def end(error: TrainingError) -> None:
        words.append(error)
        ended.set()

    def gone(watchdog: Watchdog) -> None:
        raise RuntimeError

    watchdog = Watchdog(
        dist.HashStore(), 0, 2, at_step_2(), steady_s=LIMIT_S, patient_s=LIMIT_S, end=end, poll_s=POLL_S
    )
    with watchdog:
        monkeypatch.setattr(Watchdog, "_look", gone)
        assert ended.wait(20)
    assert "has lost the store" in words[0].what and "(RuntimeError)" in words[0].why
