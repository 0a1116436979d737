"""Rows as wide as those of large models, for the tests of every kernel that goes along a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mended_interpreter import DEVICE

# The interpreter takes a second for some 100,000 elements: there few rows, and few of them.
ROWS = st.integers(1, 2 if DEVICE == "cpu" else 300)
# Odd and prime, on both sides of what a kernel holds at once, and anything else.
COLUMNS = st.sampled_from((16384, 16381, 8193, 9001, 5003)) | st.integers(1025, 16384)
# Up to the widest row that LayerNorm's kernel takes. RMSNorm's takes any.
NORM_COLUMNS = st.sampled_from((32768, 32749, 16384, 8193, 5003)) | st.integers(1025, 32768)
# Vocabularies of models, a row or two; the interpreter gets one, of as many entries as it has time for.
TOKENS = st.integers(1, 1 if DEVICE == "cpu" else 2)
VOCABULARIES = (
    st.sampled_from((50257, 32003)) | st.integers(4100, 64000)
    if DEVICE == "cpu"
    else st.sampled_from((256000, 128256, 50257)) | st.integers(4100, 256000)
)
some = settings(
    max_examples=3 if DEVICE == "cpu" else 6,  # on a GPU nearly every one is compiled anew
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # to look for a smaller failure would take minutes
)


def wide_rows(**more: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of `some` rows and cols so wide, and of what else is drawn; `cols` may be named."""
    return lambda test: some(given(**{"rows": ROWS, "cols": COLUMNS} | more)(test))
