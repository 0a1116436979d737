"""[tokenizer]: text to tokens."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import TOKENIZERS

FOREIGN = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(Section):
    """Which tokenizer made the data, for its vocabulary size and end-of-document token."""

    title: ClassVar[str] = "Tokenizer"
    account: ClassVar[str] = "host"

    tokenizer_type: (
        Literal[
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "ByteTokenizer",
            "NullTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ]
        | None
    ) = flag(
        None,
        short=True,
        metavar="TYPE",
        other="ByteTokenizer",
        refused=dict.fromkeys(FOREIGN, TOKENIZERS),
        help="HuggingFaceTokenizer, GPT2BPETokenizer, ByteTokenizer or NullTokenizer; unset: by the files "
        "given, else the one beside the data.",
    )
    tokenizer_model: str | None = flag(
        None,
        short=True,
        metavar="PATH",
        help="tokenizer.json, or a folder that holds one (HuggingFaceTokenizer).",
    )
    vocab_file: str | None = flag(None, metavar="FILE", help="vocab.json (GPT2BPETokenizer).")
    merge_file: str | None = flag(None, metavar="FILE", help="merges.txt (GPT2BPETokenizer).")
    eod_token: str | None = flag(
        None,
        own=True,
        metavar="TOKEN",
        other="</s>",
        help="The end-of-document token by name; unset: what the tokenizer's files say.",
    )
