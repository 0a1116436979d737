"""What every benchmark result says about itself: code, versions, card, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redline
from redline.files import write_json_atomic
from redline.hardware import driver_version

Keep = Callable[[list[dict[str, Any]]], object]  # gets all rows so far, so that a cut measurement leaves some


def provenance(device: str, commit: str | None = None) -> dict[str, Any]:
    """The commit, package versions, machine and date of a measurement on `device` ("cpu" or "cuda").

    Args:
        commit: of the code measured; None asks git.
    """
    import torch

    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "redline": redline.__version__,
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        import triton

        record |= {
            "triton": triton.__version__,
            "driver": driver_version(),
            "card": properties.name,
            "card_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "num_devices": torch.cuda.device_count(),
        }
    return record


def _commit() -> str | None:
    """The checked-out commit of the source tree ("-dirty" when it differs), None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def write_result(
    path: Path, case: str, device: str, results: list[dict[str, Any]], commit: str | None = None
) -> None:
    """Write one result file atomically: provenance first, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"case": case, **provenance(device, commit), "results": results})
