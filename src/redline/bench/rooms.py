"""The rooms of the fused operators, found by their own names and by those of the operators in them."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence

import redline.kernels
from redline.errors import UsageError

# Operators (docs/kernels.md has them in its first column) that are not called as their room is.
ROOMS_OF: Mapping[str, tuple[str, ...]] = {
    "norm": ("rms_norm", "layer_norm"),
    "residual_norm": ("rms_norm",),
    "rope": ("rotary",),
    "activation": ("bias_gelu", "bias_geglu", "bias_squared_relu", "bias_swiglu"),
}


def rooms() -> list[str]:
    """Names of the kernel rooms."""
    return [found.name for found in pkgutil.iter_modules(redline.kernels.__path__) if found.ispkg]


def rooms_named(words: Iterable[str]) -> list[str]:
    """The rooms of these names, each once: of rooms or operators, several in a word with commas between.

    Raises: UsageError for a name that is neither.
    """
    known: dict[str, tuple[str, ...]] = {**{name: (name,) for name in rooms()}, **ROOMS_OF}
    names = [name.strip() for word in words for name in word.split(",")]
    found: list[str] = []
    for name in names:
        if (spelt := name.replace("-", "_")) not in known:
            raise _unknown(name, list(known))
        found += known[spelt]
    return list(dict.fromkeys(found))


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    begun = [each for each in known if name and any(word.startswith(name) for word in each.split("_"))]
    near = begun or difflib.get_close_matches(name, known, n=2)
    others = "; ".join(f"{operator} is {', '.join(found)}" for operator, found in ROOMS_OF.items())
    return UsageError(
        f"there is no fused operator {name!r}.",
        why=f"the operators are {', '.join(rooms())}; {others}.",
        mend=f"did you mean {' or '.join(near)}?" if near else "name some of them, with commas between.",
    )
