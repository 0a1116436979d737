"""The tests' own ranks: whatever happens to one, it never goes on as the process it was forked from."""

from __future__ import annotations

import os
import resource

from redline.config import Environment

from .ranks import fork_ranks


def test_a_rank_that_can_write_nothing_ends() -> None:
    """As on a full disk: neither what it found nor why it failed can be kept."""
    tests = os.getpid()

    def work(environment: Environment) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        return "found"

    codes, said = fork_ranks(2, work)
    assert os.getpid() == tests, "a rank has come back from its fork"
    assert (codes, said) == ([1, 1], ["", ""])
