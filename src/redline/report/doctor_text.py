"""The doctor's report in a terminal, and as the document behind --json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from redline.doctor import Diagnosis, Finding, explained, facts_of, phrases
from redline.doctor.machine import Machine
from redline.formulas.flops import Convention
from redline.plan.cost import UNCERTAINTY, UNCERTAINTY_WIDE, StepCost
from redline.units import format_bytes

TIGHT = 0.92
HANGING = 6
WHOLE = ("gemm", "copy")  # rates in tera; the others in giga
STYLES = {"error": "bold red", "warning": "yellow", "hint": "cyan"}
CONVENTION: Convention = "causal-half"
BITS = "16-bit"


def document(diagnosis: Diagnosis, assumed: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """verdict, findings, unknown_flags, assumptions, facts as plain values."""
    launch = diagnosis.case.launch
    own = [] if launch is None else [_assumption(each) for each in launch.assumptions]
    unknown = [] if launch is None else [use for use in launch.flags if use.state == "unknown"]
    return {
        "verdict": verdict(diagnosis),
        "findings": [finding.as_dict() for finding in diagnosis.findings],
        "unknown_flags": [
            {
                "flag": use.flag,
                "value": use.value,
                "file": str(use.file),
                "line": use.line,
                "nearest": use.nearest,
            }
            for use in unknown
        ],
        "assumptions": [*assumed, *own],
        "facts": facts_of(diagnosis.case),
    }


def verdict(diagnosis: Diagnosis) -> dict[str, Any]:
    """What it comes to, in figures; null where nothing predicts or measures them."""
    case, now, after = diagnosis.case, diagnosis.now, diagnosis.after
    card = case.hardware.memory_bytes if case.hardware and case.hardware.memory_bytes else None
    run = case.run
    return {
        "worst": diagnosis.worst,
        "predicted_mfu_now": _mfu(now),
        "predicted_mfu_after": _mfu(after),
        "mfu_convention": CONVENTION,
        "mfu_over": f"dense {_peak(now) if now else BITS} peak",
        "uncertainty": UNCERTAINTY,
        "uncertainty_wide": UNCERTAINTY_WIDE,
        "speedup": None if now is None or after is None else after.tokens_per_s / now.tokens_per_s,
        "now": None if now is None else now.as_dict(),
        "after": None if after is None else after.as_dict(),
        "applied": [finding.id for finding in diagnosis.applied],
        "memory_bytes": None if now is None else round(now.memory.total),
        "memory_of_card": card,
        "fits": None if now is None or card is None else now.memory.total <= card,
        "gpu": case.hardware.name if case.hardware else None,
        "measured_mfu": run.mfu if run else None,
        "measured_step_s": run.step_s if run else None,
        "losses": [
            {
                "cause": loss.key,
                "account": loss.account,
                "share_of_step": loss.share,
                "share_of_loss": share,
                "checks": checks,
            }
            for loss, share, checks in explained(diagnosis)
        ],
        "machine": None if case.machine is None else _machine(case.machine),
    }


def print_report(
    console: Console, diagnosis: Diagnosis, assumed: Sequence[dict[str, Any]], lang: str, name: str
) -> None:
    """Verdict first, then findings, open assumptions, flags not understood."""
    say = phrases(lang)
    _print_line(console, f"{say['examined']}: {name}", 0, "dim")
    _print_verdict(console, diagnosis, say)
    _print_losses(console, diagnosis, say)
    if diagnosis.case.machine is not None:
        _print_machine(console, diagnosis.case.machine, say)
    console.print()
    if diagnosis.findings:
        _print_line(console, say["findings"], 0, "bold")
    else:
        _print_line(console, say["none_found"], 0)
    for finding in diagnosis.findings:
        _print_finding(console, finding, say)
    report = document(diagnosis, assumed)
    if report["assumptions"]:
        console.print()
        _print_line(console, say["assumptions"], 0, "bold")
        for each in report["assumptions"]:
            _print_line(console, _assumption_line(each), 2)
    if report["unknown_flags"]:
        console.print()
        _print_line(console, say["unknown"], 0, "bold")
        for each in report["unknown_flags"]:
            near = f" ({each['nearest']}?)" if each["nearest"] else ""
            _print_line(console, f"{each['file']}:{each['line']} {each['flag']}{near}", 2)


def _print_losses(console: Console, diagnosis: Diagnosis, say: Any) -> None:
    """The ledger's causes, each with the failed checks that bear on it."""
    for place, (loss, share, checks) in enumerate(explained(diagnosis)):
        if place == 0:
            console.print()
            _print_line(console, say["losses"], 0, "bold")
        account = say[f"account_{loss.account}"]
        cause = say.get(f"cause_{loss.key}", loss.cause)
        line = f"{share:6.1%}  {cause} ({account}): {' '.join(checks) or say['no_check']}"
        _print_text(console, Text(line), 2, 10)


def _print_verdict(console: Console, diagnosis: Diagnosis, say: Any) -> None:
    now, after, case = diagnosis.now, diagnosis.after, diagnosis.case
    if case.launch is None:
        return
    if now is None or after is None:
        if case.run is not None and case.run.on_cpu and case.run.mfu is not None:
            told = {"mfu": f"{case.run.mfu:.1%}", "steps": case.run.steps}
            _print_line(console, f"{say['verdict']}: {say['measured_cpu'].format(**told)}", 0)
            return
        why = say["no_gpu"] if case.hardware is None else say["no_layout"]
        told = say["unpredicted"].format(why=why)
        _print_text(console, Text.assemble((say["verdict"], "bold"), f": {told}"), 0, 2)
        if case.run is not None and case.run.mfu is not None:
            alone = {"mfu": f"{case.run.mfu:.1%}", "steps": case.run.steps}
            _print_line(console, say["measured_alone"].format(**alone), 2)
        return
    speedup = f"{after.tokens_per_s / now.tokens_per_s:.2f}x"
    words = {"now": f"{now.mfu[CONVENTION]:.1%}", "after": f"{after.mfu[CONVENTION]:.1%}", "speedup": speedup}
    if _peak(now) != _peak(after):  # two shares of different things
        for name, cost in (("now", now), ("after", after)):
            words[name] = say["mfu_of_peak"].format(mfu=words[name], format=_peak(cost))
    key = "predicted"
    if case.hardware is not None and case.hardware.memory_bytes and not case.fits(now):
        key = "predicted_unfit"
        words["used"] = format_bytes(now.memory.total)
        words["card"] = f"{format_bytes(case.hardware.memory_bytes)} {case.hardware.name}"
        words["then"] = say["then_fits" if case.fits(after) else "then_fits_not"]
    _print_text(console, Text.assemble((say["verdict"], "bold"), f": {say[key].format(**words)}"), 0, 2)
    lines = ["" if key == "predicted_unfit" else _memory_line(diagnosis, say), _accounts_line(now, say)]
    bands = {"half": f"{UNCERTAINTY:.0%}", "wide": f"{UNCERTAINTY_WIDE:.0%}"}
    lines.append(say["error_band"].format(**bands))
    if now.setup.shape.num_experts:
        lines.append(say["moe_band"])
    if case.run is not None and case.run.mfu is not None:
        measured = {"mfu": f"{case.run.mfu:.1%}", "steps": case.run.steps, "predicted": words["now"]}
        key = "measured_cpu" if case.run.on_cpu else "measured"
        lines.insert(0, say[key].format(**measured))
    for line in filter(None, lines):
        _print_line(console, line, 2)


def _peak(cost: StepCost) -> str:
    """The format whose dense peak an MFU is a share of: 16 bits also for fp8, as published figures are."""
    return cost.setup.dtype if cost.setup.dtype in ("fp32", "fp64") else BITS


def _memory_line(diagnosis: Diagnosis, say: Any) -> str:
    now, hardware = diagnosis.now, diagnosis.case.hardware
    assert now is not None and hardware is not None
    share = now.memory.total / hardware.memory_bytes if hardware.memory_bytes else 0.0
    fits = say["fits_not"] if share > 1 else say["tight"] if share > TIGHT else say["fits"]
    used, card = format_bytes(now.memory.total), format_bytes(hardware.memory_bytes)
    return str(say["memory"].format(used=used, card=f"{card} {hardware.name}", fits=fits))


def _accounts_line(cost: StepCost, say: Any) -> str:
    accounts = {say[f"account_{name}"]: seconds for name, seconds in cost.accounts.items()}
    shares = [f"{name} {seconds / cost.step_s:.0%}" for name, seconds in accounts.items() if seconds]
    causes = sorted(
        ((seconds, cause) for cause, seconds in cost.parts.items() if cause != "ideal"), reverse=True
    )
    largest = ", ".join(f"{cause} {seconds / cost.step_s:.0%}" for seconds, cause in causes[:4])
    return f"{say['accounts']}: {', '.join(shares)} ({largest})"


def _print_finding(console: Console, finding: Finding, say: Any) -> None:
    place = f"{finding.file}:{finding.line}  " if finding.file and finding.line else ""
    head = Text()
    head.append(f"{finding.id} ", style=STYLES[finding.severity])
    head.append(finding.title, style="bold")
    told = [say[finding.severity], say[f"account_{finding.account}"], gain_text(finding, say)]
    head.append(f"  [{', '.join(told)}]", style="dim")
    _print_text(console, head, 0, HANGING)
    for line in (
        f"{place}{finding.evidence}",
        f"{say['why']}: {finding.why}",
        f"{say['mend']}: {finding.mend}",
    ):
        _print_line(console, line, HANGING)
    _print_line(console, f"{say['basis']}: {finding.gain.basis}", HANGING, "dim")


def _print_line(console: Console, text: str, indent: int, style: str = "") -> None:
    _print_text(console, Text(text, style=style), indent, indent + 2)


def _print_text(console: Console, text: Text, indent: int, hanging: int) -> None:
    """A line, wrapped between words on a terminal; in a file it stays whole, so that it can be searched."""
    room = console.width - indent
    if not console.is_terminal or text.cell_len <= room or console.width < 2 * hanging:
        console.print(Text(" " * indent) + text, soft_wrap=True)
        return
    for place, line in enumerate(_cut(text, room, console.width - hanging)):
        line.rstrip()
        console.print(Text(" " * (hanging if place else indent)) + line, soft_wrap=True)


def _cut(text: Text, first: int, rest: int) -> Iterable[Text]:
    """Pieces of at most `first` and then `rest` columns; a word that is longer (a path) stays whole."""
    cuts: list[int] = []
    column, room = 0, first
    for word in re.finditer(r"\S+\s*", text.plain):
        if column and column + cell_len(word[0].rstrip()) > room:
            cuts.append(word.start())
            column, room = 0, rest
        column += cell_len(word[0])
    return text.divide(cuts)


def gain_text(finding: Finding, say: Any) -> str:
    """The gain in a few words: "gain 8% of the step, 3.2 GiB"."""
    gain = finding.gain
    if gain.step_time is None:
        text = str(say["gain_none"])
    else:
        small = abs(gain.step_time) < 5e-4
        text = str(say["gain_small"]) if small else f"{say['gain']} {gain.step_time:.1%}"
        if gain.memory_bytes is not None and abs(gain.memory_bytes) >= 2**26:
            text += f", {'-' if gain.memory_bytes > 0 else '+'}{format_bytes(abs(gain.memory_bytes))}"
    return text if finding.change.safe else f"{text}, {say['advice']}"


def _print_machine(console: Console, machine: Machine, say: Any) -> None:
    _print_line(console, say["machine"], 0, "bold")
    for line in machine_lines(machine, say):
        _print_line(console, line, 2)


def machine_lines(machine: Machine, say: Any) -> Iterator[str]:
    """What was seen of a machine, a line each."""
    for gpu in machine.gpus:
        parts = [gpu.name, f"{say['driver']} {gpu.driver}" if gpu.driver else ""]
        if gpu.memory_bytes:
            parts.append(format_bytes(gpu.memory_bytes))
        if gpu.power_limit_w:
            parts.append(f"{gpu.power_limit_w:.0f} W")
        if gpu.clock_mhz:
            parts.append(f"{gpu.clock_mhz} of {gpu.clock_max_mhz} MHz")
        if gpu.pcie_width:
            parts.append(f"PCIe x{gpu.pcie_width}")
        if gpu.nvlinks:
            parts.append(f"NVLink {gpu.nvlinks_active}/{gpu.nvlinks}")
        if gpu.ecc is not None:
            parts.append("ECC on" if gpu.ecc else "ECC off")
        yield f"GPU {gpu.index}: " + ", ".join(filter(None, parts))
    if machine.links:
        kinds = sorted({pair.kind for pair in machine.links})
        number = len(machine.links)
        yield say["links"].format(kinds=", ".join(kinds), number=number)
    for nic in machine.nics:
        yield f"{nic.kind} {nic.name}: {nic.state}" + (f", {nic.gbit:g} Gbit/s" if nic.gbit else "")
    if machine.packages:  # seen live, not from files
        yield say["numa"].format(nodes=machine.numa_nodes, governor=machine.governor or "-")
    if machine.nccl is not None:
        channels = (f"{count} x via {name}" for name, count in machine.nccl.transports.items())
        seen = ", ".join([f"{say['network']} {machine.nccl.network or '?'}", *channels])
        yield f"NCCL {machine.nccl.version or '?'}: {seen}"
    versions = [f"{name} {version}" for name, version in machine.packages.items() if version]
    if versions:
        yield ", ".join(versions)
    for name, value in machine.measured.items():
        rate = f"{value / 1e12:.3g}" if name in WHOLE else f"{value / 1e9:.4g}"
        line = say[f"measured_{name}"].format(rate=rate)
        yield f"{line} ({say['no_sheet']})" if name.startswith("cpu") else line
    for what in machine.unseen:
        yield f"{say['unseen']}: {what}"


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "gpus": [{name: getattr(gpu, name) for name in gpu.__slots__} for gpu in machine.gpus],
        "links": [{"first": each.first, "second": each.second, "kind": each.kind} for each in machine.links],
        "nics": [{name: getattr(nic, name) for name in nic.__slots__} for nic in machine.nics],
        "numa_nodes": machine.numa_nodes,
        "governor": machine.governor,
        "packages": dict(machine.packages),
        "measured": dict(machine.measured),
        "xids": list(machine.xids),
        "unseen": list(machine.unseen),
    }


def _mfu(cost: StepCost | None) -> float | None:
    return None if cost is None else cost.mfu[CONVENTION]


def _assumption(each: Any) -> dict[str, Any]:
    return {
        "name": each.name,
        "why": each.why,
        "file": str(each.file),
        "line": each.line,
        "used_by": list(each.used_by),
        "choices": list(each.choices),
    }


def _assumption_line(each: dict[str, Any]) -> str:
    where = f"{each['file']}:{each['line']} " if each["file"] and each["line"] else ""
    choices = f" ({', '.join(each['choices'])})" if each["choices"] else ""
    used = f" -> {', '.join(each['used_by'])}" if each["used_by"] else ""
    return f"{where}{each['name']}{choices}: {each['why']}{used}"
