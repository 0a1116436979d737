"""Which data a run reads: what the options name, or the demo corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from redline.config import DEMO_VOCAB_SIZE, Environment, RunConfig
from redline.data import DataSpec, DataSplits, StdlibCorpus, open_data, parse_blend, prepare_stdlib_corpus
from redline.errors import ConfigError
from redline.plan import Plan
from redline.run.vocabulary import Vocabulary

DEMO_BYTES = 6 << 20  # of source text: seconds to tokenize, more than the demo reads


def wants_demo_corpus(config: RunConfig) -> bool:
    """Whether no data is named, which means the demo.

    Raises: ConfigError when a model was chosen but no data: nobody wants an 8B model on the demo corpus unasked.
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


def open_run_data(
    config: RunConfig,
    plan: Plan,
    vocabulary: Vocabulary,
    environment: Environment,
    corpus: StdlibCorpus | None,
) -> DataSplits:
    """The splits of the run, indices built for exactly the samples it will consume."""
    data = config.data
    cache = Path(data.data_cache_path) if data.data_cache_path else environment.cache_dir / "indices"
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
            data_cache_path=cache,
            mmap_bin_files=data.mmap_bin_files,
            dataloader_type=data.dataloader_type,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
    )
