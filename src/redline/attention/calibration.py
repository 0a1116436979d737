"""What was measured on this machine, kept from run to run: seconds of each attention backend by shape.

One JSON file in the cache folder. An entry holds for the card, driver and releases it was measured with:
after an update it is measured again, and the old entry stays for the way back. A file that cannot be read is
said and replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from redline.attention.packages import PACKAGES, why_not_installed
from redline.attention.spec import Attention, Request
from redline.attention.timing import Timing, measure
from redline.files import write_json_atomic
from redline.hardware import driver_version

FORMAT = 1


class Calibration:
    """The calibration file.

    Args:
        path: of the file; its folder is made when something is written.
        say: called with one sentence when something is measured or the file is unreadable.
        measure: what measures; tests hand in their own.
        machine: what entries hold for; None reads it from this process.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], object],
        measure: Callable[[Mapping[str, Attention], Request], dict[str, Timing]] = measure,
        machine: str | None = None,
    ) -> None:
        self.path, self._say, self._measure = path, say, measure
        self._machine = machine

    def seconds(
        self, backends: Mapping[str, Attention], names: Mapping[str, str], request: Request
    ) -> tuple[dict[str, float], str]:
        """Seconds of forward and backward of each backend, and where they come from.

        Args:
            names: what each backend is ("flash-attn-4 4.0.0b36"): part of the key.

        A backend that fails (out of memory, say) is left out.
        """
        machine = machine_key() if self._machine is None else self._machine
        shape = shape_key(request, names)
        known = self._read().get(machine, {}).get(shape)
        if known is not None and set(known) == set(backends):
            return {name: each for name, each in known.items() if each is not None}, f"from {self.path}"
        self._say(f"measuring attention ({', '.join(backends)}) once for this shape on this GPU")
        timings = self._measure(backends, request)
        found = {name: None if each.failed else each.total_s for name, each in timings.items()}
        if request.device_type == "cuda":
            torch.cuda.empty_cache()
        self._write(machine, shape, found)
        return {name: each for name, each in found.items() if each is not None}, "measured now"

    def _read(self) -> dict[str, Any]:
        """The entries by machine and shape; none where there is no file, or an unreadable one."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._unreadable(str(error))
        try:
            value = json.loads(text)
        except ValueError as error:
            return self._unreadable(str(error))
        if not isinstance(value, dict) or value.get("format") != FORMAT or not _well_formed(value):
            return self._unreadable(f"it is not in format {FORMAT}")
        entries: dict[str, Any] = value["attention"]
        return entries

    def _unreadable(self, why: str) -> dict[str, Any]:
        self._say(
            f"the calibration file {self.path} cannot be used ({why}): it is measured anew and replaced"
        )
        return {}

    def _write(self, machine: str, shape: str, found: Mapping[str, float | None]) -> None:
        """Add an entry to the file as it is by now: another process may have written meanwhile."""
        entries = self._read()
        entries.setdefault(machine, {})[shape] = dict(found)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.path, {"format": FORMAT, "attention": entries})
        except OSError as error:
            self._say(f"the calibration is not kept: {self.path}: {error.strerror or error}")


def _well_formed(value: dict[str, Any]) -> bool:
    """Whether the entries are names to names to seconds."""
    entries = value.get("attention")
    if not isinstance(entries, dict) or not all(isinstance(each, dict) for each in entries.values()):
        return False
    shapes = [shape for machine in entries.values() for shape in machine.values()]
    return all(
        isinstance(shape, dict)
        and all(each is None or (isinstance(each, float) and 0 < each < 1e6) for each in shape.values())
        for shape in shapes
    )


def machine_key() -> str:
    """The card, its driver and every release that a measurement depends on."""
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts = [
        properties.name,
        f"driver {driver_version()}",
        f"torch {torch.__version__}",
        f"cuda {torch.version.cuda}",
        f"cudnn {torch.backends.cudnn.version()}",
        f"triton {triton.__version__}",
        *(package.name for package in PACKAGES if why_not_installed(package) is None),
    ]
    return ", ".join(parts)


def shape_key(request: Request, names: Mapping[str, str]) -> str:
    """Everything that was asked, and of what, as one readable key."""
    asked = " ".join(
        f"{each.name}={str(getattr(request, each.name)).removeprefix('torch.')}" for each in fields(request)
    )
    return f"{asked} among {', '.join(f'{name} ({what})' for name, what in names.items())}"
