"""Text of this machine's packages as token files: what runs on real text are trained and judged on.

    python benchmarks/text_corpus.py FOLDER [--characters 320000000] [--samples-of 1024] [--batch 64]

Python sources and documentation under the interpreter's library folders, each content once; one file in
fifty, by the hash of its path, is held out. Leaves train_text_document, valid_document, a tokenizer and
corpus.json (sizes, and the flags that read them) in FOLDER; a folder that is complete is left as it is.

The held-out text is one document, cut to whole batches of whole samples: documents are shuffled by --seed,
and only so do runs of different seeds see the same windows of the same text, all of it, at each evaluation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from redline.data.indexed import IndexedDataset
from redline.data.writer import IndexedWriter

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
VOCABULARY = 16384
SHORTEST, LONGEST = 200, 400_000  # characters: beyond stand tables and generated code


def texts() -> Iterator[tuple[str, str]]:
    """(path, text) of every file of its own content."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    seen: set[bytes] = set()
    for path in sorted({path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES}):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        mark = hashlib.sha256(text.encode()).digest()
        if SHORTEST <= len(text) <= LONGEST and mark not in seen:
            seen.add(mark)
            yield str(path), text


def write_text(folder: Path, limit: int) -> dict[str, int]:
    """Write train, valid and tokenizer .jsonl (the last from training text); the characters of each."""
    sizes = {"train": 0, "valid": 0, "tokenizer": 0}
    files = {name: (folder / f"{name}.jsonl").open("w") for name in sizes}
    for path, text in texts():
        place = hashlib.sha256(path.encode()).digest()[0] % 50
        for name in ("valid",) if place == 0 else ("train", "tokenizer") if place == 1 else ("train",):
            files[name].write(json.dumps({"text": text}) + "\n")
            sizes[name] += len(text)
        if sizes["train"] >= limit:
            break
    for file in files.values():
        file.close()
    return sizes


def prepare(folder: Path, name: str, *flags: str) -> IndexedDataset:
    """Run `redline data prepare` on one of the files."""
    command = [sys.executable, "-m", "redline", "data", "prepare", str(folder / f"{name}.jsonl"), *flags]
    subprocess.run([*command, "--output-prefix", str(folder / name)], check=True, stdout=subprocess.DEVNULL)
    return IndexedDataset(folder / f"{name}_text_document")


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--characters", type=int, default=320_000_000)
    parser.add_argument("--samples-of", type=int, default=1024, help="tokens a sample")
    parser.add_argument("--batch", type=int, default=64, help="samples of a global batch")
    args = parser.parse_args()
    folder: Path = args.folder
    facts = folder / "corpus.json"
    if facts.exists():
        print(facts.read_text())
        return
    folder.mkdir(parents=True, exist_ok=True)
    characters = write_text(folder, args.characters)
    prepare(folder, "tokenizer", "--train-tokenizer", str(VOCABULARY))
    tokenizer = folder / "tokenizer_tokenizer.json"
    train, valid = (prepare(folder, name, "--tokenizer-model", str(tokenizer)) for name in ("train", "valid"))
    tokens = np.concatenate([valid[index] for index in range(len(valid))])
    batches = (len(tokens) - 1) // (args.samples_of * args.batch)
    with IndexedWriter(folder / "valid_document", valid.dtype) as writer:
        writer.add_document(tokens[: batches * args.samples_of * args.batch + 1])
    found = {
        "characters": {name: characters[name] for name in ("train", "valid")},
        "documents": {"train": len(train), "valid": len(valid)},
        "tokens": {
            "train": int(train.lengths.sum(dtype="int64")),
            "valid": batches * args.samples_of * args.batch,
        },
        "flags": f"--tokenizer-model {tokenizer} --train-data-path {folder / 'train_text_document'} "
        f"--valid-data-path {folder / 'valid_document'} --eval-iters {batches}",
    }
    facts.write_text(json.dumps(found, indent=1))
    print(facts.read_text())


if __name__ == "__main__":
    main()
