"""The operators of a run that have a fused kernel: the names by which rooms speak of them."""

from __future__ import annotations

from typing import Literal, get_args

Operator = Literal[
    "norm",
    "qk_norm",
    "rope",
    "activation",
    "bias_dropout_add",
    "masked_softmax",
    "embedding",
    "cross_entropy",
    "linear_cross_entropy",
    "adamw",
    "grad_norm",
    "residual_norm",
]
OPT_IN: frozenset[Operator] = frozenset(("residual_norm",))  # they run where they are asked for, only
OPERATORS: frozenset[Operator] = frozenset(get_args(Operator)) - OPT_IN

# Whole models that differ in the loss: its logits in memory, or made and used in chunks.
WITH_LOGITS = OPERATORS - {"linear_cross_entropy"}
WITHOUT_LOGITS = OPERATORS - {"cross_entropy"}
