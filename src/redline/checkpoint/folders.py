"""The folder of all checkpoints of a run: which are complete, which one is the latest, which may go.

    <root>/latest                  one line, the name of the checkpoint to resume from
    <root>/iter_0000100/           a complete checkpoint; renamed to this after its last fsync
    <root>/iter_0000200.partial/   a save that is running, or was cut; never read, removed by the next save
    <root>/iter_0000100.replaced/  the old one while a new checkpoint of the same iteration takes its name

At every moment a complete checkpoint exists, and `latest` (or, without that file, the highest iteration)
leads to it, so a run killed anywhere resumes from at most one save interval ago. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from redline.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from redline.errors import CheckpointError
from redline.files import fsync_dir, os_errors_as, write_text_atomic

LATEST = "latest"

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to resume from.

    Attributes:
        folder: None when `root` holds no checkpoint at all.
        notices: sentences for the user: unfinished saves that were passed over, a fallback and its reason.
    """

    folder: Path | None
    notices: tuple[str, ...] = ()


def folder_name(iteration: int) -> str:
    """123 -> 'iter_0000123'."""
    assert iteration >= 0, iteration
    return f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is while it is being written."""
    return root / (folder_name(iteration) + _PARTIAL)


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints in `root`, oldest iteration first (files present and of their sizes)."""
    return [folder for _, folder in sorted(_candidates(root).items()) if _damage(folder, False) is None]


def find_iteration(root: Path, iteration: int) -> Path:
    """The checkpoint of one iteration. Raises CheckpointError that lists what there is."""
    candidates = _candidates(root)
    if iteration not in candidates:
        there = ", ".join(map(str, sorted(candidates))) or "none"
        raise CheckpointError(
            f"{root} holds no checkpoint of iteration {iteration}.", mend=f"iterations there: {there}."
        )
    return candidates[iteration]


def find_latest(root: Path, *, verify: bool = False) -> Found:
    """The checkpoint that `latest` names; where that is missing or damaged, the newest complete one below it.

    Those above it are of a run that was rolled back, and are used only where nothing else is left. Without a
    name in `latest`, the newest complete one.

    Args:
        root: the folder of checkpoints; a single checkpoint's own folder is accepted too.
        verify: also compare the checksums of all files (reads the whole checkpoint once).

    Raises: CheckpointError when there are checkpoints and not one of them is complete.
    """
    if (root / MANIFEST).exists():
        fault = _damage(root, verify)
        return _nothing_complete(root, [fault]) if fault else Found(root)
    notices = [
        f"{path} is a save that did not finish; it is ignored, and the next save removes it."
        for path in _entries(root)
        if _NAME.fullmatch(path.stem) and path.suffix == _PARTIAL
    ]
    candidates, faults = _candidates(root), []
    pointed = (root / LATEST).exists()
    named = _named_by_latest(root) if pointed else None
    if pointed and named not in candidates:
        wanted = "no checkpoint" if named is None else f"{folder_name(named)}, which is missing"
        faults.append(f"{root / LATEST} names {wanted}")
    for iteration in _by_preference(candidates, named):
        folder = candidates[iteration]
        fault = _damage(folder, verify)
        if fault is None:
            if said := _choice_told(candidates, iteration, named, faults):
                notices.append(said)
            return Found(folder, tuple(notices))
        faults.append(fault)
    return _nothing_complete(root, faults) if faults else Found(None, tuple(notices))


def _by_preference(iterations: Iterable[int], named: int | None) -> list[int]:
    """Newest first, but those above the named one, which a roll-back has left behind, last."""
    return sorted(iterations, key=lambda each: (named is not None and each > named, -each))


def _choice_told(candidates: Mapping[int, Path], chosen: int, named: int | None, faults: list[str]) -> str:
    """Why this checkpoint and which newer one is passed over; "" where there is nothing to tell."""
    folder, newest = candidates[chosen], candidates[max(candidates)]
    if not faults:
        passed_over = f"{newest} is newer than {folder}, which `{LATEST}` names; it is not used."
        return passed_over if chosen < max(candidates) else ""
    why = "; ".join(faults)
    if named is None or max(candidates) <= named:
        return f"{why}; using {folder}, the newest complete checkpoint."
    if chosen < named:
        return (
            f"{why}; using {folder}, the newest complete checkpoint before that one "
            f"({newest} is newer than what `{LATEST}` names and is not used)."
        )
    return (
        f"{why}; using {folder} as a last resort: it is newer than what `{LATEST}` names, as of a run "
        "that was rolled back, and no older checkpoint is complete."
    )


def open_partial(root: Path, iteration: int) -> Path:
    """Remove what cut saves left in `root` and make an empty folder for this one.

    Raises: CheckpointError when `root` cannot be written.
    """
    partial = partial_folder(root, iteration)
    with os_errors_as(CheckpointError, root, "write checkpoints to"):
        root.mkdir(parents=True, exist_ok=True)
        for stray in root.glob(f".{LATEST}.*.tmp"):  # `latest` about to be replaced
            stray.unlink()
        for path in _entries(root):
            superseded = path.suffix == _REPLACED and path.with_suffix("").exists()
            if _NAME.fullmatch(path.stem) and (superseded or path.suffix == _PARTIAL):
                shutil.rmtree(path, ignore_errors=True)
        partial.mkdir()
    return partial


def commit(partial: Path, iteration: int, keep: int | None, keep_every: int | None) -> None:
    """Give a fully written folder its name, let `latest` name it, then remove what need not be kept.

    The order is what makes a kill harmless: the content is durable before the rename, the rename before
    `latest`, and `latest` before anything is removed. Raises OSError.
    """
    root, folder = partial.parent, partial.with_suffix("")
    replaced = folder.with_suffix(_REPLACED)
    fsync_dir(partial)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    fsync_dir(root)
    write_text_atomic(root / LATEST, folder.name + "\n")
    for old in retired(root, iteration, keep, keep_every):
        _remove(old)
    if replaced.exists():
        _remove(replaced)


def retired(root: Path, newest: int, keep: int | None, keep_every: int | None) -> list[Path]:
    """The checkpoints that may go once that of iteration `newest` is complete.

    The `keep` highest iterations up to `newest` stay (None: all), and multiples of `keep_every`. Higher ones
    are of a run that was rolled back; they are left alone until training has passed them.
    """
    candidates = _candidates(root)
    older = sorted((n for n in candidates if n < newest), reverse=True)
    surplus = [] if keep is None else older[keep - 1 :]
    return [candidates[n] for n in surplus if not keep_every or n % keep_every]


def _candidates(root: Path) -> dict[int, Path]:
    """Folders with a checkpoint's name by iteration; `.replaced` counts where its successor is missing."""
    found: dict[int, Path] = {}
    for path in _entries(root):  # iter_X sorts before iter_X.replaced
        match = _NAME.fullmatch(path.name.removesuffix(_REPLACED))
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return found


def _entries(root: Path) -> list[Path]:
    with os_errors_as(CheckpointError, root, "read checkpoints from"):
        return sorted(root.iterdir()) if root.is_dir() else []


def _named_by_latest(root: Path) -> int | None:
    """The iteration in `latest`; None when it holds no checkpoint's name."""
    with os_errors_as(CheckpointError, root / LATEST, "read"):
        match = _NAME.fullmatch((root / LATEST).read_text(errors="replace").strip())
    return int(match[1]) if match else None


def _damage(folder: Path, checksums: bool) -> str | None:
    try:
        return find_damage(folder, read_manifest(folder), checksums=checksums)
    except CheckpointError as exc:
        what, why = exc.what.rstrip("."), exc.why.rstrip(".")
        says_more = why and not isinstance(exc.__cause__, OSError)  # of a refusal, `what` holds the reason
        return f"{what}: {why}" if says_more else what


def _nothing_complete(root: Path, faults: list[str]) -> NoReturn:
    raise CheckpointError(
        f"{root} holds no complete checkpoint.",
        why=f"{'; '.join(faults)}.",
        mend="restore one from a copy, or start afresh in an empty folder.",
    )


def _remove(folder: Path) -> None:
    """Rename aside first, so that a kill during the removal leaves no half checkpoint under a good name.

    What cannot be removed now (a reader on a network disk holds it open) goes with the next save.
    """
    aside = folder.with_suffix(_PARTIAL)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
