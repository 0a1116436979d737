"""Checkpoints of earlier releases: what they do not say is as it was then."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from redline.config import RunConfig, to_dict, with_values
from redline.formulas.shape import ModelShape
from redline.run.resume import FREE_FIELDS, LATER_FIELDS, Start, changed_options, model_values

# What the first release's checkpoints hold of a model. Never to grow: a field that comes later goes into
# LATER_FIELDS with the value that means "as before".
FIRST_FIELDS = {
    "num_layers", "hidden", "ffn", "num_heads", "num_groups", "head_dim", "vocab_size",
    "padded_vocab_size", "max_positions", "activation", "normalization", "norm_epsilon",
    "zero_centered_gamma", "position", "rotary_base", "rotary_percent", "rotary_interleaved",
    "rope_scaling", "bias_linear", "bias_qkv", "qk_norm", "tied", "hidden_dropout",
    "attention_dropout", "softmax_scale", "init_std", "embedding_init_std", "num_experts",
    "moe_ffn", "moe_topk", "moe_shared_ffn", "moe_layer_pattern", "mtp_num_layers",
}  # fmt: skip
SHAPE = ModelShape(
    num_layers=2, hidden=32, ffn=64, num_heads=4, num_groups=4, head_dim=8, vocab_size=90,
    padded_vocab_size=128, max_positions=16,
)  # fmt: skip


def test_a_model_without_later_options_is_that_of_an_earlier_checkpoint() -> None:
    """Each later field has its default in LATER_FIELDS: else no checkpoint saved before it would load."""
    later = {field.name: field.default for field in fields(ModelShape) if field.name not in FIRST_FIELDS}
    assert later == LATER_FIELDS
    assert model_values(SHAPE).keys() == FIRST_FIELDS - set(FREE_FIELDS)


def test_options_that_an_earlier_checkpoint_lacks_had_their_defaults() -> None:
    """They differ from a run of now only where it gives them."""
    saved = to_dict(RunConfig())
    del saved["model"]["activation_func_clamp_value"], saved["model"]["glu_linear_offset"]
    start = Start(Path("earlier"), False, {"config": saved})
    assert changed_options(RunConfig(), start) == []
    (line,) = changed_options(with_values(RunConfig(), {"glu_linear_offset": 1.0}), start)
    assert line.startswith("resume: model.glu_linear_offset: 0.0 in the checkpoint, 1.0 now")
