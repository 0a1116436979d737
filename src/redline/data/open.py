"""From paths, weights and splits to one source of microbatches per split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from redline.choice import Choice
from redline.data.blend import blend_order, normalized, parse_blend, samples_to_build
from redline.data.cache import Arrays, cached_arrays
from redline.data.indexed import IndexedDataset
from redline.data.microbatch import BatchFormat
from redline.data.packed import BoundedSamples, PackedFormat, PackedSamples, token_efficiency
from redline.data.packing import PackedOrder, build_packed_order
from redline.data.samples import BlendedSamples, DocumentSamples, MockStore, Samples, TokenStore
from redline.data.sampling import SampleOrder, build_sample_order, plan_epochs
from redline.data.source import Format, Source
from redline.data.spec import DataSpec
from redline.data.split import SPLIT_NAMES, parse_split, split_ranges
from redline.errors import ConfigError, DataError
from redline.units import round_up

MOCK = "--mock-data"
DOCUMENTS_STEP = 8  # the array of starts grows in steps, so that similar data sets share compiled code


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one data set contributes to one split.

    Attributes:
        split: "train", "valid" or "test".
        name: the prefix, or "--mock-data".
        weight: its share of the samples drawn.
        num_documents, num_tokens: of one epoch.
        epochs: how often its tokens are seen when the announced samples are consumed.
    """

    split: str
    name: str
    weight: float
    num_documents: int
    num_tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class DataSplits:
    """The opened data of a run.

    Attributes:
        train: always there.
        valid, test: None when no samples of it were wanted, or when it holds no documents (see `choices`).
        choices: data sets and splits that are left out, with the reason.
        parts: what each data set contributes.
    """

    train: Source
    valid: Source | None
    test: Source | None
    choices: tuple[Choice, ...]
    parts: tuple[PartReport, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """The documents one store gives to one split."""

    name: str
    store: TokenStore
    documents: range
    num_tokens: int


@dataclass(slots=True)
class _Opener:
    spec: DataSpec
    choices: list[Choice] = field(default_factory=list)
    reports: list[PartReport] = field(default_factory=list)
    stores: dict[str, TokenStore] = field(default_factory=dict)

    def source(self, number: int, wanted: int) -> Source | None:
        """The source of split `number`, None when nothing is wanted of it or it is empty."""
        spec, name = self.spec, SPLIT_NAMES[number]
        if wanted == 0:
            return None
        flag, words, share = self._paths(number)
        prefixes, weights = ([MOCK], None) if spec.mock_data else parse_blend(words, flag)
        parts = [self._part(prefix, number, share) for prefix in prefixes]
        kept = [i for i, part in enumerate(parts) if part.num_tokens and (weights is None or weights[i] > 0)]
        asked = f"{flag} {' '.join(words)}" if share is None else f"--split {spec.split}"
        if not kept:
            self._refuse_or_drop(name, asked, parts)
            return None
        for i in sorted(set(range(len(parts))) - set(kept)):
            why = "its weight is 0" if parts[i].num_tokens else "it holds no tokens for this split"
            self._leave_out(name, parts[i], asked, why)
        chosen = [parts[i] for i in kept]
        # As in Megatron-LM, a lone file is blended (built with a surplus) only when --data-path weighs it.
        if weights is None or (share is None and len(prefixes) == 1):
            samples = self._unweighted(name, chosen, wanted)
        else:
            samples = self._weighted(name, chosen, normalized([weights[i] for i in kept]), wanted)
        return Source(samples, self._format(samples), cyclic=spec.dataloader_type == "cyclic")

    def _format(self, samples: Samples) -> Format:
        """How rows of `samples` become model input."""
        spec = self.spec
        if samples.max_documents:
            most = round_up(samples.max_documents, DOCUMENTS_STEP)
            return PackedFormat(
                max_documents=most, eod_id=spec.eod_id, pad_id=spec.pad_id, eod_mask_loss=spec.eod_mask_loss
            )
        return BatchFormat(
            eod_id=spec.eod_id,
            pad_id=spec.pad_id,
            reset_position_ids=spec.reset_position_ids,
            reset_attention_mask=spec.reset_attention_mask,
            eod_mask_loss=spec.eod_mask_loss,
        )

    def _paths(self, number: int) -> tuple[str, tuple[str, ...], tuple[float, float, float] | None]:
        """(flag, its words, the split or None when the split has files of its own)."""
        spec = self.spec
        if spec.mock_data or spec.data_path:
            flag = MOCK if spec.mock_data else "--data-path"
            return flag, spec.data_path, parse_split(spec.split)
        own = (spec.train_data_path, spec.valid_data_path, spec.test_data_path)[number]
        return f"--{SPLIT_NAMES[number]}-data-path", own, None

    def _store(self, prefix: str) -> TokenStore:
        """The tokens of one data set, opened once."""
        spec = self.spec
        if prefix in self.stores:
            return self.stores[prefix]
        if spec.mock_data:
            eod_id = spec.vocab_size - 1 if spec.eod_id is None else spec.eod_id
            self.stores[prefix] = MockStore(spec.vocab_size, eod_id)
            return self.stores[prefix]
        pair = IndexedDataset(prefix, mmap=spec.mmap_bin_files)
        if pair.dtype.kind == "f":
            raise DataError(
                f"{pair.bin_path} holds {pair.dtype.name} numbers.",
                why="token ids are whole numbers.",
                mend="name token files; `redline data inspect` shows what a pair holds.",
            )
        self.stores[prefix] = pair
        return pair

    def _part(self, prefix: str, number: int, share: tuple[float, float, float] | None) -> _Part:
        store = self._store(prefix)
        everything = range(len(store.lengths))
        documents = everything if share is None else split_ranges(share, len(store.lengths))[number]
        num_tokens = int(store.lengths[documents.start : documents.stop].sum(dtype="int64"))
        return _Part(prefix, store, documents, num_tokens)

    def _leave_out(self, split: str, part: _Part, asked: str, why: str) -> None:
        self.choices.append(Choice(f"{split} data {part.name}", asked, "left out", why))

    def _refuse_or_drop(self, name: str, asked: str, parts: Sequence[_Part]) -> None:
        """No data set has tokens for this split: an error for training, else evaluation is off."""
        held = " and ".join(f"{part.name} holds {_documents(len(part.store.lengths))}" for part in parts)
        empty = not any(int(part.store.lengths.sum(dtype="int64")) for part in parts)
        why = f"no --{name}-data-path is given"
        if parts:
            why = f"{held}, {'without a token' if empty else f'and this leaves none for the {name} split'}"
        if name == "train":
            raise DataError(
                f"{asked.strip()}: the train split is empty.",
                why=f"{why}.",
                mend="give more documents, or a larger share to training.",
            )
        self.choices.append(Choice(f"{name} split", asked.strip(), "off", f"{why}; it is not evaluated"))

    def _unweighted(self, split: str, parts: Sequence[_Part], wanted: int) -> Samples:
        """One file alone, or several by their size: each once, or often enough for `wanted` samples."""
        if len(parts) == 1:
            self._report(split, parts, [1.0], wanted)
            return self._documents(parts[0], wanted)
        per_epoch = [self._samples_of_an_epoch(part) for part in parts]
        if wanted > sum(per_epoch):
            return self._weighted(split, parts, normalized([part.num_tokens for part in parts]), wanted)
        chosen = [part for part, count in zip(parts, per_epoch, strict=True) if count]
        for part, count in zip(parts, per_epoch, strict=True):
            if not count:
                self._leave_out(split, part, f"{wanted} samples", "it is shorter than one sample")
        weights = normalized([count for count in per_epoch if count])
        return self._blend(split, chosen, weights, [None] * len(chosen), wanted)

    def _samples_of_an_epoch(self, part: _Part) -> int:
        if self.spec.packing:
            return len(self._packed_order(part, None))
        return plan_epochs(part.num_tokens, self.spec.seq_length, None).num_samples

    def _weighted(self, split: str, parts: Sequence[_Part], weights: Sequence[float], wanted: int) -> Samples:
        sizes = [samples_to_build(weight, wanted) for weight in weights]
        # Normalised twice, as Megatron-LM does: ties of the greedy order depend on the last bit.
        return self._blend(split, parts, normalized(weights), sizes, wanted)

    def _blend(
        self,
        split: str,
        parts: Sequence[_Part],
        weights: Sequence[float],
        sizes: Sequence[int | None],
        wanted: int,
    ) -> Samples:
        self._report(split, parts, weights, wanted)
        drawn = [self._documents(part, size) for part, size in zip(parts, sizes, strict=True)]

        def build() -> Arrays:
            dataset, sample = blend_order(weights, wanted)
            return {"dataset": dataset, "sample": sample}

        order = cached_arrays(self.spec.data_cache_path, ("blend", list(weights), wanted), build)
        return BlendedSamples(drawn, order["dataset"], order["sample"])

    def _documents(self, part: _Part, num_samples: int | None) -> Samples:
        """The samples of one data set, cut or filled as the options say."""
        spec = self.spec
        if spec.packing:
            order = self._packed_order(part, num_samples)
            packed = PackedSamples(part.store, order, spec.seq_length, spec.vocab_size, spec.pad_id)
            filled, most = token_efficiency(packed), packed.max_documents - 1
            why = f"{filled:.1%} of the places hold tokens, at most {most} documents in a sample"
            self.choices.append(Choice(f"packing of {part.name}", "on", "best-fit decreasing", why))
            return packed
        cut = self._cut(part, num_samples)
        return BoundedSamples(cut) if spec.mark_documents else cut

    def _packed_order(self, part: _Part, num_samples: int | None) -> PackedOrder:
        spec, lengths, documents = self.spec, part.store.lengths, part.documents

        def build() -> Arrays:
            order = build_packed_order(
                lengths, documents, seq_length=spec.seq_length, num_samples=num_samples, seed=spec.seed
            )
            return {field.name: getattr(order, field.name) for field in fields(order)}

        mine = lengths[documents.start : documents.stop]
        parts = ("packed", mine, documents, spec.seq_length, num_samples, spec.seed)
        order = PackedOrder(**cached_arrays(spec.data_cache_path, parts, build))
        if not len(order):
            raise DataError(
                f"--packing: {part.name} holds no document of two tokens or more.",
                why="the last token of a document is a label only, so one token alone teaches nothing.",
                mend="leave --packing out, or prepare the data with --append-eod.",
            )
        return order

    def _cut(self, part: _Part, num_samples: int | None) -> DocumentSamples:
        spec, lengths, documents = self.spec, part.store.lengths, part.documents

        def build() -> Arrays:
            order = build_sample_order(
                lengths, documents, seq_length=spec.seq_length, num_samples=num_samples, seed=spec.seed
            )
            return {
                "document": order.document_index,
                "sample": order.sample_index,
                "shuffle": order.shuffle_index,
            }

        mine = lengths[documents.start : documents.stop]
        parts = ("samples", mine, documents, spec.seq_length, num_samples, spec.seed)
        arrays = cached_arrays(spec.data_cache_path, parts, build)
        num_epochs = len(arrays["document"]) // len(documents)
        order = SampleOrder(arrays["document"], arrays["sample"], arrays["shuffle"], num_epochs)
        return DocumentSamples(part.store, order, spec.seq_length, spec.vocab_size, spec.pad_id)

    def _report(self, split: str, parts: Sequence[_Part], weights: Sequence[float], wanted: int) -> None:
        for part, weight in zip(parts, weights, strict=True):
            epochs = wanted * weight * self.spec.seq_length / part.num_tokens
            self.reports.append(
                PartReport(split, part.name, weight, len(part.documents), part.num_tokens, epochs)
            )


def _documents(count: int) -> str:
    return f"{count} document{'' if count == 1 else 's'}"


def open_data(spec: DataSpec) -> DataSplits:
    """Open the data of a run.

    Raises: ConfigError for paths, weights or a split that cannot be obeyed; DataError when a file is missing
        or damaged, or the training split holds no token.
    """
    opener = _Opener(spec)
    train = opener.source(0, spec.train_samples)
    if train is None:
        raise ConfigError(
            f"--train-samples {spec.train_samples}: there is nothing to train on.",
            mend="ask for at least one sample.",
        )
    valid, test = opener.source(1, spec.valid_samples), opener.source(2, spec.test_samples)
    _one_size([source for source in (train, valid, test) if source is not None])
    return DataSplits(train, valid, test, tuple(opener.choices), tuple(opener.reports))


def _one_size(sources: Sequence[Source]) -> None:
    """Packed splits get arrays of boundaries of one size: an evaluation runs the code of the training."""
    packed = [source.format for source in sources if isinstance(source.format, PackedFormat)]
    for source, format in zip(sources, packed, strict=False):
        source.format = replace(format, max_documents=max(each.max_documents for each in packed))
