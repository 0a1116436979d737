"""Which attention backend a run uses, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from redline.attention import flash, fused, unfused
from redline.attention.spec import Attention, Request
from redline.choice import Choice
from redline.errors import ConfigError


class Backend(NamedTuple):
    """A backend and the function that says why it cannot take a request."""

    run: Attention
    supports: Callable[[Request], str | None]
    what: str


# From the fastest to the plainest; `auto` takes the first that supports the run.
BACKENDS: dict[str, Backend] = {
    "fused": Backend(fused.fused_attention, fused.supports, "cuDNN's fused kernel"),
    "flash": Backend(flash.flash_attention, flash.supports, "PyTorch's flash kernel"),
    "unfused": Backend(
        unfused.unfused_attention, unfused.supports, "plain steps, the score matrix in memory"
    ),
}


def select_backend(
    asked: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_groups: int,
    seq_length: int = 128,
    dropout: float = 0.0,
    segments: bool = False,
    deterministic: bool = False,
) -> tuple[Attention, Choice]:
    """The backend to call and the record of the choice.

    Args:
        asked: "auto" or the name of a backend.
        device_type: "cpu" or "cuda".
        dropout: the probability of attention dropout.
        segments: whether documents are packed into a sample and kept apart.

    Raises: ConfigError when a backend asked for by name does not exist or cannot take the run.
    """
    request = Request(
        device_type=device_type,
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_groups=num_groups,
        seq_length=seq_length,
        dropout=dropout > 0,
        segments=segments,
        deterministic=deterministic,
    )
    if asked != "auto":
        return _named(asked, request)
    refusals: list[str] = []
    for name, backend in BACKENDS.items():
        reason = backend.supports(request)
        if reason is None:
            why = "; ".join([backend.what, *refusals])
            return backend.run, Choice("attention-backend", "auto", name, why)
        refusals.append(f"not {name}: {reason}")
    raise AssertionError("unfused takes every request")


def _named(asked: str, request: Request) -> tuple[Attention, Choice]:
    """The backend called `asked`, or a ConfigError that says why not."""
    if asked not in BACKENDS:
        raise ConfigError(
            f"--attention-backend {asked} is not available.",
            why="this installation has no backend of that name.",
            mend=f"use auto, {', '.join(BACKENDS)}.",
        )
    backend = BACKENDS[asked]
    if reason := backend.supports(request):
        raise ConfigError(
            f"--attention-backend {asked} cannot run this model here.",
            why=f"{reason}.",
            mend="use --attention-backend auto, which takes the fastest one that can.",
        )
    return backend.run, Choice("attention-backend", asked, asked, f"asked for by name; {backend.what}")
