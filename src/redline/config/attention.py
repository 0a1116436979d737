"""[attention]: which attention runs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(Section):
    """The attention backend."""

    title: ClassVar[str] = "Attention"
    account: ClassVar[str] = "kernels"

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto",
        short=True,
        other="unfused",
        shorthands={"--use-flash-attn": "flash"},
        help="auto: the fastest measured here; flash: FlashAttention; fused: cuDNN; local: Redline's own; "
        "unfused: scores written out.",
    )
    flash_attention_version: Literal[2, 3, 4] | None = flag(
        None,
        needs={"attention_backend": "flash"},
        help="Which FlashAttention package; unset: the newest installed, else PyTorch's own kernel.",
    )
