"""The size of a run's vocabulary, which its options leave to the tokenizer beside the data.

A checkpoint says it. So does the number of parameters in summary.json, which grows by one row of the
embedding (and one of an untied head) for each entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from redline.config import DEMO_VOCAB_SIZE, RunConfig, with_values
from redline.errors import ConfigError
from redline.formulas.params import count_parameters
from redline.formulas.resolve import shape_of

LEAST = 2  # entries of the smallest vocabulary that an option can state
CHECKPOINTS = "checkpoints/iter_*/values.json"


def stated_vocab_size(config: RunConfig) -> int | None:
    """The size that the options alone give: stated, of a preset, or of the demo's own corpus.

    None where a tokenizer brings it: the demo model reads other data as well, in that data's vocabulary.
    """
    model, data = config.model, config.data
    if model.vocab_size is not None or model.preset != "demo":
        return model.vocab_size
    tokenizer = config.tokenizer
    named = (
        *(data.data_path, data.train_data_path, data.mock_data),
        *(tokenizer.tokenizer_type, tokenizer.tokenizer_model, tokenizer.vocab_file),
    )
    return None if any(named) else DEMO_VOCAB_SIZE


def recorded_vocab_size(folder: Path, config: RunConfig, parameters: int | None) -> int | None:
    """The size of the vocabulary that the run in `folder` trained; None where nothing there tells it.

    Args:
        config: the run's own options.
        parameters: of its summary, where there is one.
    """
    saved = next(_of_checkpoints(folder), None)
    return saved if saved is not None or parameters is None else _of_parameters(config, parameters)


def _of_checkpoints(folder: Path) -> Iterator[int]:
    """What each checkpoint says, the newest first; one that is damaged says nothing."""
    for path in sorted(folder.glob(CHECKPOINTS), reverse=True):
        try:
            size = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab_size"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if type(size) is int and size >= LEAST:
            yield size


def _of_parameters(config: RunConfig, parameters: int) -> int | None:
    """The size with which the model has so many parameters."""
    try:
        least, more = (_parameters(config, size) for size in (LEAST, LEAST + 1))
    except ConfigError:
        return None
    rows, rest = divmod(parameters - least, more - least)
    return LEAST + rows if rows >= 0 and not rest else None


def _parameters(config: RunConfig, vocab_size: int) -> int:
    model = with_values(config, {"padded_vocab_size": None}).model  # padding holds no parameters
    shape = shape_of(model, config.train.seq_length, vocab_size, moe=config.moe, mtp=config.mtp)
    return count_parameters(shape).total
