"""What the data of a run depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Everything the data of a run depends on, as plain values; names are those of the options.

    Attributes:
        seq_length: tokens of a sample.
        vocab_size: the model's true vocabulary; ids from here on are refused.
        train_samples, valid_samples, test_samples: samples the run will consume; 0 opens no source.
        seed: of the shuffles.
        eod_id: end-of-document token; needed by the three switches below.
        pad_id: marks padding in the data (Megatron-LM's -1 when the tokenizer has none).
        data_path: `prefix` or `weight prefix ...`, cut into splits by `split`.
        train_data_path, valid_data_path, test_data_path: the same, a whole file for each split.
        split: weights of train, valid and test over the documents of `data_path`.
        mock_data: synthetic documents in place of files.
        data_cache_path: folder for built indices; None builds them in memory.
        mmap_bin_files: map .bin files; False reads the pieces asked for.
        dataloader_type: "single" or "cyclic".
        packing: fill samples with whole documents, kept apart.
        mark_documents: cut samples as ever, and keep the documents in them apart (Megatron-LM's
            `--dataloader-inter-document-masking`).
        reset_position_ids, reset_attention_mask, eod_mask_loss: see `BatchFormat`.
    """

    seq_length: int
    vocab_size: int
    train_samples: int
    valid_samples: int = 0
    test_samples: int = 0
    seed: int = 1234
    eod_id: int | None = None
    pad_id: int = -1
    data_path: tuple[str, ...] = ()
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split: str = "969, 30, 1"
    mock_data: bool = False
    data_cache_path: Path | None = None
    mmap_bin_files: bool = True
    dataloader_type: str = "single"
    packing: bool = False
    mark_documents: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        switches = [
            f"--{name.replace('_', '-')}"
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(self, name)
        ]
        if switches and self.eod_id is None:
            raise ConfigError(
                f"{' '.join(switches)}: no end-of-document token is known.",
                why="documents inside a sample are told apart by that token.",
                mend="name the tokenizer with --tokenizer-model, and its token with --eod-token if need be.",
            )
        if self.dataloader_type not in ("single", "cyclic"):
            raise ConfigError(
                f"--dataloader-type {self.dataloader_type} is not known.", mend="use single or cyclic."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"--seed {self.seed} cannot seed the data shuffles.",
                why="they use a 32-bit seed, as Megatron-LM's do.",
                mend=f"use 0 to {2**32 - 1}.",
            )
        self._check_paths()

    def _check_paths(self) -> None:
        per_split = any((self.train_data_path, self.valid_data_path, self.test_data_path))
        given = {
            "--mock-data": self.mock_data,
            "--data-path": bool(self.data_path),
            "--train-data-path": per_split,
        }
        named = [flag for flag, is_given in given.items() if is_given]
        if len(named) != 1:
            raise ConfigError(
                f"{' and '.join(named)} exclude one another." if named else "no training data is named.",
                why="the data comes from one of --data-path, the --train/valid/test-data-path options, "
                "or --mock-data.",
                mend="give exactly one of them.",
            )
