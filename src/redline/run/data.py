"""Which data a run reads: what the options name, or the demo corpus."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from redline.config import DEMO_VOCAB_SIZE, Environment, RunConfig
from redline.data import DataSpec, DataSplits, StdlibCorpus, open_data, parse_blend, prepare_stdlib_corpus
from redline.errors import ConfigError, DataError
from redline.plan import Plan
from redline.run.vocabulary import Vocabulary

DEMO_BYTES = 6 << 20  # of source text: seconds to tokenize, more than the demo reads


def wants_demo_corpus(config: RunConfig) -> bool:
    """Whether no data is named, which means the demo.

    Raises: ConfigError when a model was chosen but no data: nobody wants an 8B model on the demo corpus.
    """
    data = config.data
    if data.mock_data or data.data_path or data.train_data_path:
        return False
    if config.model.preset not in (None, "demo"):
        raise ConfigError(
            f"--preset {config.model.preset}: no training data is named.",
            why="only the demo model brings its own corpus.",
            mend="add --data-path PREFIX (made by `redline data prepare`), or --mock-data to measure speed.",
        )
    return True


def demo_corpus(environment: Environment, report: Callable[[str], object]) -> StdlibCorpus:
    """The standard library's source text, tokenized; made once a machine and Python version."""
    folder = environment.cache_dir
    if refused := _refused(folder):
        raise DataError(
            f"the demo corpus cannot be kept in {folder}: {refused}.",
            why="it is made once, in the user's cache.",
            mend="set XDG_CACHE_HOME to a folder that can be written, or name data with --data-path.",
        )
    report("no data is named: training on the demo corpus, the source text of Python's standard library.")
    return prepare_stdlib_corpus(
        environment.cache_dir, vocab_size=DEMO_VOCAB_SIZE, max_bytes=DEMO_BYTES, report=report
    )


def data_prefixes(config: RunConfig, corpus: StdlibCorpus | None) -> list[str]:
    """The token files the run reads, each once."""
    if corpus is not None:
        return [corpus.prefix]
    data, prefixes = config.data, []
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if words := getattr(data, flag):
            prefixes += parse_blend(words, f"--{flag.replace('_', '-')}")[0]
    return list(dict.fromkeys(prefixes))


def _refused(folder: Path) -> str | None:
    """Why nothing can be written into `folder`, which is made if need be; None when it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(folder, os.W_OK) else os.strerror(errno.EACCES)


def _index_cache(config: RunConfig, environment: Environment, report: Callable[[str], object]) -> Path | None:
    """Where sample indices are kept: where the user says, else in the user's cache if that can be written."""
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    folder = environment.cache_dir / "indices"
    refused = _refused(folder)
    if refused:
        report(f"sample indices are not kept: {folder}: {refused} (--data-cache-path names another place).")
    return None if refused else folder


def open_run_data(
    config: RunConfig,
    plan: Plan,
    vocabulary: Vocabulary,
    environment: Environment,
    corpus: StdlibCorpus | None,
    report: Callable[[str], object],
) -> DataSplits:
    """The splits of the run, indices built for exactly the samples it will consume."""
    data = config.data
    return open_data(
        DataSpec(
            seq_length=config.train.seq_length,
            vocab_size=vocabulary.size,
            train_samples=plan.batch.total_samples,
            valid_samples=plan.evaluation.samples,
            test_samples=plan.evaluation.samples,
            seed=config.train.seed,
            eod_id=vocabulary.eod_id,
            data_path=data.data_path if corpus is None else (corpus.prefix,),
            train_data_path=data.train_data_path,
            valid_data_path=data.valid_data_path,
            test_data_path=data.test_data_path,
            split=data.split,
            mock_data=data.mock_data,
            data_cache_path=_index_cache(config, environment, report),
            mmap_bin_files=data.mmap_bin_files,
            dataloader_type=data.dataloader_type,
            packing=data.packing,
            mark_documents=data.dataloader_inter_document_masking,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
    )
