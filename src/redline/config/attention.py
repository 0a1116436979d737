"""[attention]: which attention runs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import ATTENTION_VARIANTS, OWN_ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(Section):
    """The attention backend."""

    title: ClassVar[str] = "Attention"
    account: ClassVar[str] = "kernels"

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto",
        short=True,
        other="unfused",
        refused={"local": OWN_ATTENTION},
        shorthands={"--use-flash-attn": "flash"},
        help="auto: the fastest here; flash: FlashAttention; fused: cuDNN; unfused: scores written out.",
    )
    flash_attention_version: Literal[2, 3, 4] | None = flag(
        None,
        waits_for=ATTENTION_VARIANTS,
        needs={"attention_backend": "flash"},
        help="Version of FlashAttention; unset: newest.",
    )
