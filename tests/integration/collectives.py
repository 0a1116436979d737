"""What this rank sends, counted where torch.distributed is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from redline.comm import collectives
from redline.formulas.traffic import sent_bytes

Counts = dict[str, tuple[int, float]]


@contextmanager
def counted(ranks: int) -> Iterator[Counts]:
    """{kind: (how many, bytes sent)} of the collectives that start inside, on a group of so many ranks."""
    found: Counts = {}

    def note(kind: Any, num_bytes: int) -> None:
        count, size = found.get(kind, (0, 0.0))
        found[kind] = count + 1, size + sent_bytes(kind, num_bytes, ranks)

    def spy(kind: str, call: Any, whole: int) -> Any:
        """`whole` is the number of the argument that holds the whole tensor."""

        def spied(*args: Any, **options: Any) -> Any:
            note(kind, args[whole].nbytes)
            return call(*args, **options)

        return spied

    def exchange(batch: list[Any]) -> Any:
        for each in batch:
            if each.op is collectives.dist.isend:
                note("send", each.tensor.nbytes)
        return send(batch)

    send = collectives.dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.dist, "all_reduce", spy("all_reduce", collectives.dist.all_reduce, 0))
        patch.setattr(collectives, "_all_gather", spy("all_gather", collectives._all_gather, 0))
        patch.setattr(collectives, "_reduce_scatter", spy("reduce_scatter", collectives._reduce_scatter, 1))
        patch.setattr(collectives.dist, "batch_isend_irecv", exchange)
        yield found
