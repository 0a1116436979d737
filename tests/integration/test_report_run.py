"""A run of a few steps, profiled, and the page that is made of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .conftest import TINY


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = TINY.replace("--no-profile-ledger", "--train-iters 8").split()
    # In a process of its own: its memory is measured, and this one has room left by other tests' models.
    for command in (
        ["train", *words, "--eval-interval", "4", "--save", str(folder), "--save-interval", "4"],
        ["report", str(folder), "--price-per-gpu-hour", "3"],
    ):
        subprocess.run(
            [sys.executable, "-m", "redline", *command],
            check=True,
            capture_output=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
    page = (folder / "report.html").read_text()

    def shown(value: float) -> bool:
        return f'<data value="{value}">' in page

    summary = json.loads((folder / "summary.json").read_text())
    account = json.loads((folder / "ledger.json").read_text())
    assert summary["world_size"] == 1
    for key in ("tokens_per_s", "train_loss", "valid_loss", "step_time_s"):
        assert shown(summary[key]), key
    assert all(shown(each["mfu"]) for each in summary["mfu"].values()) and len(summary["mfu"]) == 2
    assert shown(float(summary["measured_memory_bytes"])) and shown(
        float(summary["predicted_memory"]["total"])
    )
    assert all(shown(loss["ms"]) for loss in account["losses"])
    assert shown(account["mfu"]) and shown(account["wall_ms"])
    for name in ("evaluation", "checkpoint", "profiled"):
        assert f'<path class="mark {name}"' in page
    assert 'class="absent">No ' not in page
