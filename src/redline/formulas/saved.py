"""The modules by which saved activations are shown: what was predicted beside what a run counted."""

from __future__ import annotations

from collections.abc import Iterable

from redline.formulas.activations import Held

EMBEDDING, UNIT, FINAL_NORM, HEAD = "embedding", "unit", "final_norm", "head"
# In the order of a forward pass, each with what it saves.
MODULES = {
    EMBEDDING: "the batch, rotary angles, dropout mask",
    UNIT: "inputs of units of full recompute",
    "attention.norm": "its input and statistics",
    "attention.qkv": "its input",
    "attention.core": "q, k, v, what their norm keeps, and what the backend keeps",
    "attention.proj": "its input, the output of attention",
    "attention.dropout": "mask",
    "mlp": "input of an MLP that is recomputed as a whole",
    "mlp.norm": "its input and statistics",
    "mlp.fc1": "its input",
    "mlp.activation": "the output of fc1, and what a plain curve keeps",
    "mlp.fc2": "its input, the output of the activation",
    "mlp.dropout": "mask",
    FINAL_NORM: "its input and statistics",
    HEAD: "input of the head, and what the loss keeps",
}
_OF_SITE = {
    "batch": EMBEDDING,
    "rope": EMBEDDING,
    "dropout": EMBEDDING,
    "attention.q_norm": "attention.core",
    "attention.k_norm": "attention.core",
    "loss": HEAD,
}


def module_of(held: Held) -> str:
    """The module that keeps a tensor; of several that save the same one, the last in the forward pass."""
    if held.site == "mlp.fc1" and held.what == "output":
        return "mlp.activation"
    return _OF_SITE.get(held.site, held.site)


def by_module(times: Iterable[tuple[int, Held]]) -> dict[str, int]:
    """Bytes of (how often, tensor) by module, in the order of MODULES."""
    sums = dict.fromkeys(MODULES, 0)
    for count, held in times:
        sums[module_of(held)] += count * held.num_bytes
    return {name: size for name, size in sums.items() if size}
