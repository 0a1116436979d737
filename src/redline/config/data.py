"""[data]: token files, their mixture and split, and how samples are read."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import DATA_FILES, DATA_SHARDING, EXTERNAL_LOADER


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Section):
    """Where tokens come from. With none of the paths and no --mock-data, the demo corpus."""

    title: ClassVar[str] = "Data"
    account: ClassVar[str] = "host"

    data_path: tuple[str, ...] = flag(
        (),
        short=True,
        metavar="PATH",
        excludes="data",
        help="Prefix of .bin/.idx files, or several: weight1 prefix1 weight2 prefix2 ...",
    )
    train_data_path: tuple[str, ...] = flag((), metavar="PATH", help="The same for training alone.")
    valid_data_path: tuple[str, ...] = flag((), metavar="PATH", help="The same for validation alone.")
    test_data_path: tuple[str, ...] = flag((), metavar="PATH", help="The same for the test alone.")
    data_args_path: str | None = flag(
        None, metavar="FILE", waits_for=DATA_FILES, help="File that holds --data-path."
    )
    per_split_data_args_path: str | None = flag(
        None, metavar="FILE", waits_for=DATA_FILES, help="JSON file with the paths of each split."
    )
    split: str = flag(
        "969, 30, 1",
        short=True,
        metavar="A,B,C",
        other="90,5,5",
        help="Shares of --data-path for training, validation and test.",
    )
    mock_data: bool = flag(False, short=True, excludes="data", help="Synthetic tokens: nothing is read.")
    data_cache_path: str | None = flag(
        None, metavar="DIR", help="Folder for the sample indices; unset: in the user's cache."
    )
    mmap_bin_files: bool = flag(True, help="Map token files into memory rather than read them.")
    num_workers: int = flag(2, at_least=0, help="Threads that prepare batches ahead of the step.")
    dataloader_type: Literal["single", "cyclic", "external"] = flag(
        "single",
        refused={"external": EXTERNAL_LOADER},
        help="single: the shuffled epochs in order; cyclic: a new permutation each epoch.",
    )
    data_sharding: bool | None = flag(
        None,
        megatron=True,
        waits_for=DATA_SHARDING,
        already=(False,),
        help="Shard each epoch of cyclic over the ranks.",
    )
    reset_position_ids: bool = flag(False, help="Restart positions after each end-of-document token.")
    reset_attention_mask: bool = flag(False, help="Keep attention inside a document.")
    eod_mask_loss: bool = flag(False, help="No loss where the input token is end-of-document.")
    create_attention_mask_in_dataloader: bool | None = flag(
        None,
        built_in="masks are never materialised by the loader.",
        already=(False,),
        help="Build masks in the loader.",
    )
    packing: bool = flag(
        False,
        own=True,
        excludes="documents",
        help="Fill samples with whole documents, kept apart; throughput counts real tokens.",
    )
    dataloader_inter_document_masking: bool = flag(
        False,
        excludes="documents",
        help="Cut samples from the stream as ever, and keep the documents in them apart.",
    )


def packs(data: DataConfig) -> bool:
    """Whether documents lie in one row, told by their starts."""
    return data.packing or data.dataloader_inter_document_masking


def split_shares(split: str) -> tuple[float, float, float] | None:
    """The shares of training, validation and test, summing to 1; None when `split` does not state them."""
    try:
        shares = [float(share) for share in split.replace("/", ",").replace(",", " ").split()]
    except ValueError:
        return None
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < total < float("inf"):
        return None
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test
