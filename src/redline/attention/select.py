"""Which attention backend a run uses, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from redline.attention import flash, fused, unfused
from redline.attention.calibration import Calibration
from redline.attention.local import local_attention
from redline.attention.local import supports as local_supports
from redline.attention.spec import Attention, Request
from redline.choice import Choice
from redline.errors import ConfigError
from redline.units import format_duration


class Backend(NamedTuple):
    """A backend: the function for a request, why it cannot take one, what it is."""

    make: Callable[[Request], Attention]
    supports: Callable[[Request], str | None]
    what: Callable[[Request], str]
    no_fp8: str


def _flash(request: Request) -> Attention:
    attention = flash.find(request).attention
    assert attention is not None, "supports() is asked first"
    return attention


# From the fastest to the plainest: the order in which `auto` prefers them where nothing is measured.
BACKENDS: dict[str, Backend] = {
    "fused": Backend(
        lambda _: fused.fused_attention,
        fused.supports,
        lambda _: "cuDNN's fused kernel",
        "PyTorch hands cuDNN no fp8 attention",
    ),
    "flash": Backend(
        _flash, flash.supports, lambda request: flash.find(request).what, "FlashAttention has no fp8 backward"
    ),
    "local": Backend(
        lambda _: local_attention,
        local_supports,
        lambda _: "Redline's own Triton kernel",
        "its kernels multiply in 16 bits at least",
    ),
    "unfused": Backend(
        lambda _: unfused.unfused_attention,
        unfused.supports,
        lambda _: "plain steps, the score matrix in memory",
        "its products run in the compute dtype",
    ),
}
# What may stand between a request and a backend, and how to ask for less: (field, without it, how).
LESS: tuple[tuple[str, Any, str], ...] = (
    ("dropout", False, "--attention-dropout 0"),
    ("segments", False, "no --reset-attention-mask"),
    ("packed", False, "no packed documents (--packing)"),
    ("window", None, "no --window-size"),
    ("softcap", 0.0, "no --attn-logit-softcapping"),
    ("sinks", False, "--softmax-type vanilla"),
    ("deterministic", False, "no --deterministic-mode"),
    ("flash_version", None, "no --flash-attention-version"),
)


def supports(name: str, request: Request) -> str | None:
    """Why the backend called `name` cannot take `request`, or None."""
    backend = BACKENDS[name]
    return backend.no_fp8 if request.fp8 else backend.supports(request)


def select_backend(
    asked: str, request: Request, calibration: Calibration | None = None
) -> tuple[Attention, Choice]:
    """The backend to call and the record of the choice.

    Args:
        asked: "auto" or the name of a backend.
        calibration: with which `auto` compares the backends of a GPU; None takes the first that can run.

    Raises: ConfigError when a backend asked for by name does not exist or cannot take the run.
    """
    if asked != "auto":
        return _named(asked, request)
    refusals = {name: reason for name in BACKENDS if (reason := supports(name, request))}
    if request.device_type == "cpu":
        refusals.setdefault("local", "on a CPU it runs interpreted, to be tested")
    names = [name for name in BACKENDS if name not in refusals]
    if not names:
        raise ConfigError(
            "no attention backend can run this model here.",
            why="; ".join(f"{name}: {reason}" for name, reason in refusals.items()) + ".",
            mend="leave out what they refuse.",
        )
    chosen, measured = names[0], ""
    # In 16 bits the plain steps never win; in fp32 they have cuBLAS on their side, where they fit.
    compared = [name for name in names if name != "unfused" or request.dtype == torch.float32]
    if calibration is not None and request.device_type == "cuda" and len(compared) > 1:
        chosen, measured = _fastest(compared, request, calibration, names[0])
    backend = BACKENDS[chosen]
    why = "; ".join(
        [backend.what(request), *([measured] if measured else []), *_others(refusals, names, chosen)]
    )
    return backend.make(request), Choice("attention-backend", "auto", chosen, why)


def _fastest(names: list[str], request: Request, calibration: Calibration, otherwise: str) -> tuple[str, str]:
    """The fastest of `names`, and what they took."""
    backends = {name: BACKENDS[name].make(request) for name in names}
    what = {name: BACKENDS[name].what(request) for name in names}
    seconds, origin = calibration.seconds(backends, what, request)
    if not seconds:
        return otherwise, "none of them ran to its end when measured"
    listed = sorted(seconds, key=seconds.__getitem__)
    figures = ", ".join(f"{name} {format_duration(seconds[name])}" for name in listed)
    return listed[0], f"forward and backward of a layer, {origin}: {figures}"


def _others(refusals: dict[str, str], names: list[str], chosen: str) -> list[str]:
    """Why those before the chosen one were not taken."""
    order = list(BACKENDS)
    before = order[: order.index(chosen)]
    return [f"not {name}: {refusals[name]}" for name in before if name in refusals]


def _named(asked: str, request: Request) -> tuple[Attention, Choice]:
    """The backend called `asked`, or a ConfigError that says why not."""
    if asked not in BACKENDS:
        raise ConfigError(
            f"--attention-backend {asked} is not available.",
            why="this installation has no backend of that name.",
            mend=f"use auto, {', '.join(BACKENDS)}.",
        )
    if reason := supports(asked, request):
        raise ConfigError(
            f"--attention-backend {asked} cannot run this model here.",
            why=f"{reason}.",
            mend=f"use {_less(asked, request)}--attention-backend auto, "
            "which takes the fastest one that can.",
        )
    backend = BACKENDS[asked]
    why = f"asked for by name; {backend.what(request)}"
    return backend.make(request), Choice("attention-backend", asked, asked, why)


def _less(asked: str, request: Request) -> str:
    """ "--attention-dropout 0, or ": what would let `asked` run; "" where nothing in LESS does."""
    plain = replace(request, **{name: without for name, without, _ in LESS})
    if supports(asked, plain):
        return ""
    found = [
        how for name, _, how in LESS if supports(asked, replace(plain, **{name: getattr(request, name)}))
    ]
    return f"{' and '.join(found)}, or " if found else ""
