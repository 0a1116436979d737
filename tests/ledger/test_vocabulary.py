"""The size of a run's vocabulary from what the run left behind."""

import pytest

from redline.config import RunConfig, with_values
from redline.formulas.params import count_parameters
from redline.formulas.resolve import shape_of
from redline.ledger import recorded_vocab_size, stated_vocab_size

SHAPES = [
    {"hidden_size": 48, "num_attention_heads": 3},
    {"untie_embeddings_and_output_weights": True, "padded_vocab_size": 1024},
    {"num_experts": 4, "mtp_num_layers": 1, "activation_func": "swiglu"},
]


@pytest.mark.parametrize("vocab_size", [2, 301, 1000])
@pytest.mark.parametrize("values", SHAPES)
def test_parameters_tell_it(values, vocab_size, tmp_path):
    """Tied or not, padded or not; a number of parameters that no vocabulary gives tells nothing."""
    config = with_values(RunConfig(), values)
    shape = shape_of(config.model, config.train.seq_length, vocab_size, moe=config.moe, mtp=config.mtp)
    parameters = count_parameters(shape).total
    assert recorded_vocab_size(tmp_path, config, parameters) == vocab_size
    assert recorded_vocab_size(tmp_path, config, parameters + 1) is None
    assert recorded_vocab_size(tmp_path, config, 3) is None
    assert recorded_vocab_size(tmp_path, config, None) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', '{"model": {"vocab_size": "5"}}'])
def test_a_damaged_checkpoint_tells_nothing(text, tmp_path):
    """The one before it does, as resuming falls back on it."""
    for iteration, content in (2, '{"model": {"vocab_size": 300}}'), (10, text):
        folder = tmp_path / "checkpoints" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(content)
    assert recorded_vocab_size(tmp_path, RunConfig(), None) == 300


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({"preset": "demo"}, 4096),
        ({"preset": "demo", "vocab_size": 300}, 300),
        ({"preset": "demo", "data_path": ("mine_text_document",)}, None),
        ({"preset": "demo", "mock_data": True}, None),
        ({"preset": "demo", "tokenizer_model": "tokenizer.json"}, None),
        ({}, None),
    ],
)
def test_the_demo_brings_its_own_only_on_its_own_corpus(values, size):
    assert stated_vocab_size(with_values(RunConfig(), values)) == size
