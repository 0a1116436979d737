"""Known models, as values of options: `--preset NAME`.

Each table states the shape that the model's authors published, a sequence length to train at (that of the
main part of its pre-training where it is known; long context came afterwards) and no dropout where none was
named. Vocabulary sizes are the rows of the published embedding, so parameter counts are the published ones.
"""

from collections.abc import Mapping
from typing import Any

from redline.config.presets.demo import DEMO, DEMO_VOCAB_SIZE
from redline.config.presets.gpt import GPT
from redline.config.presets.llama import LLAMA
from redline.config.presets.mistral import MISTRAL
from redline.config.presets.qwen import QWEN

__all__ = ["DEMO_VOCAB_SIZE", "PRESETS"]

PRESETS: Mapping[str, Mapping[str, Any]] = {**DEMO, **GPT, **LLAMA, **QWEN, **MISTRAL}
