"""`redline memory --against RUN`: what a run measured, and its own options as its folder holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.config import InvalidConfigError, Problem, RunConfig
from redline.config.flags import to_flag
from redline.config.model import REQUIRED_FIELDS
from redline.config.parse import is_config
from redline.config.toml import load_toml
from redline.errors import ConfigError
from redline.files import os_errors_as
from redline.hardware import Hardware, detect_cpu, hardware_named
from redline.ledger import read_memory_summary, recorded_vocab_size
from redline.plan import Plan
from redline.units import format_bytes


@dataclass(frozen=True, slots=True)
class Against:
    """The run of `--against`, and the options that stand beside it.

    Attributes:
        summary: its summary.json, with the name under which it is shown.
        words: the command line of what is predicted: the run's own options with those given on top, or
            those given alone where they are a configuration of their own.
        options: the config.toml that the run left, where the prediction begins with it.
    """

    folder: Path
    summary: Mapping[str, Any]
    words: Sequence[str]
    options: Path | None

    @property
    def ranks(self) -> int | None:
        """How many it ran on."""
        return self.summary.get("world_size")

    def device(self, config: RunConfig) -> Hardware | None:
        """What the run ran on, where the prediction is of its options and `config` names no other kind.

        None also of a device without a data sheet.
        """
        hardware = self.summary.get("hardware") or {}
        kind, name = hardware.get("kind"), hardware.get("name")
        if self.options is None or (kind and config.runtime.device not in ("auto", kind)):
            return None
        if kind == "cpu":
            return detect_cpu()
        return hardware_named(name) if isinstance(name, str) else None

    def vocab_size(self, config: RunConfig) -> int | None:
        """The size of the run's vocabulary, unless `config` states another than it did.

        None where the prediction is not of the run's options. Raises: InvalidConfigError where nothing that
        the run left tells it.
        """
        if self.options is None:
            return None
        own = load_toml(self.options, training=False).config
        if config.model.vocab_size != own.model.vocab_size:
            return config.model.vocab_size
        found = recorded_vocab_size(self.folder, own, self.summary.get("parameters"))
        if found is None and own.model.vocab_size is None:
            raise InvalidConfigError(
                [
                    Problem(
                        "vocabulary-stated",
                        f"--against {self.folder}: the size of the run's vocabulary is not recorded.",
                        "its options leave it to the tokenizer beside the data; no checkpoint in its folder "
                        "names it, and the parameters of its summary do not tell it.",
                        "give --vocab-size beside --against.",
                        ("--vocab-size",),
                    )
                ]
            )
        return found or own.model.vocab_size

    def comparison(self, plan: Plan) -> dict[str, Any]:
        """What the run measured, beside this prediction and the one it made itself."""
        run = self.summary
        peak = run.get("measured_memory_bytes")
        return {
            "run": run["name"],
            "parameters": run.get("parameters"),
            "measured_peak_bytes": peak,
            "measured": run.get("measured_memory"),
            "measure": run.get("memory_measure"),
            "measured_after_forward": run.get("measured_after_forward"),
            "measured_activations": run.get("measured_activations"),
            "predicted_by_the_run": (run.get("predicted_memory") or {}).get("total"),
            "predicted_over_measured": plan.memory.total / peak if peak else None,
        }

    def print(self, plan: Plan) -> None:
        """The same as a table."""
        from redline.cli.console import ReportConsole
        from redline.report.text import memory_table

        run = self.summary
        peak = run.get("measured_memory_bytes")
        found = (run.get(f"measured_{name}") for name in ("memory_bytes", "after_forward", "activations"))
        table = memory_table(plan.memory.as_dict(), run.get("measured_memory"), *found)
        table.title = f"against the run {run['name']}"
        if run.get("parameters") not in (None, plan.parameters.total):
            table.add_row("another model: parameters", f"{plan.parameters.total:,}", f"{run['parameters']:,}")
        if peak:
            table.add_row("predicted / measured", f"{plan.memory.total / peak:.3f}", "")
        itself = (run.get("predicted_memory") or {}).get("total")
        if itself and itself != plan.memory.total:
            table.add_row("the run itself predicted", format_bytes(itself), "")
        ReportConsole().print(table)


def open_against(path: Path, words: Sequence[str]) -> Against:
    """The run in a folder, or of a summary.json, beside these words of the command line.

    Raises: ConfigError when it has no readable summary, or neither it nor `words` say what to predict.
    """
    folder = path if path.is_dir() else path.parent
    summary = _summary(folder / "summary.json" if path.is_dir() else path)
    names = {word.partition("=")[0] for word in words}
    if "--preset" in names or any(map(is_config, words)):
        return Against(folder, summary, words, None)
    options = folder / "config.toml"
    if options.is_file():
        return Against(folder, summary, [str(options), *words], options)
    if names >= set(map(to_flag, REQUIRED_FIELDS)):
        return Against(folder, summary, words, None)
    raise ConfigError(
        f"--against {path}: the run's own options are not known: there is no {options}.",
        why="a run leaves them there, and no model is stated beside --against.",
        mend="restore the file, or state the model with --preset, a CONFIG.toml, or its shape.",
    )


def _summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    try:
        with os_errors_as(ConfigError, path, "read"):
            return {"name": path.absolute().parent.name, **read_memory_summary(path)}
    except ValueError as exc:
        raise ConfigError(
            f"--against {path}: this is no summary of a run: {exc}.",
            why="what a run measured stands in the summary.json that it left; this one is damaged.",
            mend="name the folder of another run.",
        ) from exc
