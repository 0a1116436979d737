"""Rules of the model's shape, its tokens and its data."""

from redline.config.data import split_shares
from redline.config.rules.rule import Broken, rule, rules_of, show
from redline.config.tree import RunConfig


def divisors(number: int, near: int) -> str:
    """The divisors of `number` on either side of `near`, for a mend."""
    dividing = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in dividing if divisor <= near][-2:]
    above = [divisor for divisor in dividing if divisor > near][:2]
    return " or ".join(map(str, below + above))


@rule(
    "heads-divide-hidden",
    "num_attention_heads",
    "hidden_size",
    "kv_channels",
    why="without --kv-channels each head has hidden_size / num_attention_heads channels.",
)
def heads_divide_hidden(config: RunConfig) -> Broken:
    m = config.model
    if m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return None
    what = f"--num-attention-heads {m.num_attention_heads} does not divide --hidden-size {m.hidden_size}."
    return what, f"use {divisors(m.hidden_size, m.num_attention_heads)} heads, or state --kv-channels."


@rule(
    "groups-divide-heads",
    "num_query_groups",
    "num_attention_heads",
    why="each key and value head serves the same number of query heads.",
)
def groups_divide_heads(config: RunConfig) -> Broken:
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if groups is None or heads % groups == 0:
        return None
    what = f"--num-query-groups {groups} does not divide --num-attention-heads {heads}."
    return what, f"use {divisors(heads, groups)} groups."


@rule(
    "window-before",
    "window_size",
    why="under a causal mask no token sees one after itself, and a window without limit is none.",
)
def window_before(config: RunConfig) -> Broken:
    window = config.model.window_size
    if window is None or (window[0] >= 0 and window[1] <= 0):
        return None
    before = window[0] if window[0] >= 0 else 128
    return f"--window-size {window[0]} {window[1]} asks for what cannot be.", f"use --window-size {before} 0."


@rule(
    "groups-stated",
    "group_query_attention",
    "num_query_groups",
    why="--group-query-attention means as many groups as --num-query-groups says.",
)
def groups_stated(config: RunConfig) -> Broken:
    if not config.model.group_query_attention or config.model.num_query_groups is not None:
        return None
    what = "--group-query-attention is given without --num-query-groups."
    return what, "state it; --num-query-groups 1 (multi-query attention) is Megatron's default."


@rule(
    "positions-cover-sequence",
    "max_position_embeddings",
    "seq_length",
    why="a sample may not be longer than the model has positions.",
)
def positions_cover_sequence(config: RunConfig) -> Broken:
    positions, length = config.model.max_position_embeddings, config.train.seq_length
    if positions is None or positions >= length:
        return None
    what = f"--seq-length {length} exceeds --max-position-embeddings {positions}."
    return what, f"use --seq-length {positions} or less, or raise --max-position-embeddings."


@rule(
    "rotary-channels",
    "rotary_percent",
    "kv_channels",
    "hidden_size",
    "num_attention_heads",
    why="rotary positions turn pairs of a head's channels.",
)
def rotary_channels(config: RunConfig) -> Broken:
    m = config.model
    channels = m.kv_channels or m.hidden_size // m.num_attention_heads
    if m.position_embedding_type != "rope" or int(channels * m.rotary_percent) >= 2:
        return None
    what = f"--rotary-percent {m.rotary_percent} of {channels} channels a head leaves no pair to rotate."
    return what, "raise --rotary-percent, or use fewer and wider heads."


@rule(
    "padding-covers-vocabulary",
    "padded_vocab_size",
    "vocab_size",
    why="the stored matrices hold a row for every token.",
)
def padding_covers_vocabulary(config: RunConfig) -> Broken:
    padded, vocab = config.model.padded_vocab_size, config.model.vocab_size
    if padded is None or vocab is None or padded >= vocab:
        return None
    return (
        f"--padded-vocab-size {padded} is less than --vocab-size {vocab}.",
        f"use {vocab} or more, or leave it out.",
    )


@rule(
    "paths-of-splits",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_path",
    "mock_data",
    "split",
    why="paths of each split take the place of one set of paths and its shares.",
)
def paths_of_splits(config: RunConfig) -> Broken:
    d = config.data
    if not (d.train_data_path or d.valid_data_path or d.test_data_path):
        return None
    for name in ("data_path", "mock_data", "split"):
        if getattr(d, name) != getattr(type(d)(), name):
            what = f"{show(name, getattr(d, name))} is given beside paths of single splits."
            return what, "keep either it or --train-data-path, --valid-data-path and --test-data-path."
    if not d.train_data_path:
        return (
            "there is no --train-data-path beside the paths of other splits.",
            "give it, or use --data-path with --split.",
        )
    return None


@rule(
    "mock-data-reads-nothing",
    "mock_data",
    "data_cache_path",
    "mmap_bin_files",
    why="synthetic tokens come from no file.",
)
def mock_data_reads_nothing(config: RunConfig) -> Broken:
    d = config.data
    if not d.mock_data or (d.data_cache_path is None and d.mmap_bin_files):
        return None
    name = "mmap_bin_files" if d.data_cache_path is None else "data_cache_path"
    return f"{show(name, getattr(d, name))} has no effect with --mock-data.", "leave it out."


@rule(
    "split-shares",
    "split",
    why="the split states up to three shares of the data, not negative and not all zero.",
)
def split_has_shares(config: RunConfig) -> Broken:
    if split_shares(config.data.split) is not None:
        return None
    return f'--split "{config.data.split}" is no split.', "write for example --split 969,30,1."


@rule(
    "tokenizer-files",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "eod_token",
    "vocab_size",
    why="each kind of tokenizer reads its own files and no others.",
)
def tokenizer_files(config: RunConfig) -> Broken:
    t = config.tokenizer
    given = {name for name in ("tokenizer_model", "vocab_file", "merge_file") if getattr(t, name) is not None}
    kind = t.tokenizer_type or ("GPT2BPETokenizer" if given - {"tokenizer_model"} else "HuggingFaceTokenizer")
    wanted = {
        "GPT2BPETokenizer": {"vocab_file", "merge_file"},
        "HuggingFaceTokenizer": {"tokenizer_model"},
    }.get(kind, set())
    if t.tokenizer_type is None and not given:
        return None
    if extra := sorted(given - wanted):
        return (
            f"{kind} does not read {show(extra[0], getattr(t, extra[0]))}.",
            "leave it out, or correct --tokenizer-type.",
        )
    if missing := sorted(wanted - given):
        return f"{kind} needs --{missing[0].replace('_', '-')}.", "give the file."
    if t.eod_token is not None and not wanted:
        return f"{kind} has no token {t.eod_token!r} to name by --eod-token.", "leave it out."
    if kind == "NullTokenizer" and config.model.vocab_size is None:
        return "NullTokenizer needs --vocab-size.", "state the number of tokens."
    return None


RULES = rules_of(globals())
