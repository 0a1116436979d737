"""The page in Chromium, from a disk, in a narrow window: it shows, loads nothing, and nothing goes wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_run import account_of, make_run
from read_page import read_page

from redline.cli.main import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 500  # the narrowest window of a headless Chromium

# Put into a copy of the page: collects what goes wrong, uses the page, writes down what it saw.
PROBE = """
<script>
const seen = {errors: []};
addEventListener("error", event => seen.errors.push(event.message), true);
addEventListener("securitypolicyviolation", event => seen.errors.push(event.violatedDirective));
addEventListener("load", () => {
  const svg = document.querySelector("figure[data-chart=loss] .area svg"), box = svg.getBoundingClientRect();
  const readout = document.querySelector("figure[data-chart=loss] .readout");
  const key = name => svg.dispatchEvent(new KeyboardEvent("keydown", {key: name}));
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right}));
  seen.pointed = readout.textContent;
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  seen.left = readout.textContent;
  key("ArrowRight"); key("ArrowRight");
  seen.keyed = readout.textContent;
  location.hash = document.querySelector("details:not([open]) tr[id]").id;
  requestAnimationFrame(() => {
    seen.unfolded = document.getElementById(location.hash.slice(1)).closest("details").open;
    seen.loaded = performance.getEntriesByType("resource").map(each => each.name);
    seen.width = document.documentElement.scrollWidth;
    seen.plots = [...document.querySelectorAll(".area")].map(each => each.getBoundingClientRect().height);
    document.body.dataset.seen = JSON.stringify(seen);
  });
});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_in_a_browser(tmp_path: Path) -> None:
    account = account_of()
    long = replace(account.operators[0], name="a_very_long_operator_name_without_a_blank" * 4)
    account = replace(account, operators=(long, *account.operators[1:]))
    folder = make_run(tmp_path / ("a_long_name_of_a_run_" * 5), ledger=account)
    cast = {"amax": 3.5, "scale": 5e9, "saturated": 0.1, "underflowed": 1e-7}
    rows = (
        {"step": 9, "site": "layers.0.attention.qkv", "operand": name, **cast} for name in ("x", "w", "dy")
    )
    (folder / "fp8.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["report", str(folder), "--price-per-gpu-hour", "2"]) == 0
    page = (folder / "report.html").read_text()
    probed = tmp_path / "probed.html"
    probed.write_text(page.replace("<style>", PROBE + "<style>", 1))

    seen, noise = browse(probed, tmp_path)
    assert seen["errors"] == [] and "CONSOLE" not in noise
    assert seen["loaded"] == []
    assert seen["pointed"].startswith("step 60: training 2.0698, validation 2.3099") and seen["left"] == ""
    assert seen["keyed"].startswith("step 2: training 7.")
    assert seen["unfolded"] is True
    assert seen["width"] <= WIDTH
    assert len(seen["plots"]) == 7 and min(seen["plots"]) > 100
    assert len(set(pixels(tmp_path / "page.png"))) > 60


def browse(page: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """What the probe saw, and what Chromium logged; a screenshot is left in the folder."""
    assert BROWSER is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += [f"--window-size={WIDTH},2000", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    words += [f"--screenshot={folder / 'page.png'}", "--dump-dom", page.as_uri()]
    done = subprocess.run([BROWSER, *words], capture_output=True, text=True, timeout=200, check=True)
    body = read_page(done.stdout).one("body")
    return json.loads(body.attributes["data-seen"]), done.stderr


def pixels(path: Path) -> bytes:
    """The filtered scan lines of a PNG: a blank picture has next to no different bytes."""
    data = path.read_bytes()
    at, packed = 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    return zlib.decompress(packed)
