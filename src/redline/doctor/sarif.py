"""Findings as SARIF 2.1.0, for code scanning in CI."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redline
from redline.doctor.checks import CHECKS
from redline.doctor.finding import Finding
from redline.doctor.messages import texts_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "hint": "note"}


def sarif(findings: Iterable[Finding], lang: str = "en") -> dict[str, Any]:
    """One SARIF log with one run; every check is a rule."""
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "redline doctor",
                        "version": redline.__version__,
                        "informationUri": "https://github.com/redline-train/redline",
                        "rules": [_rule(each.id, each.severity, lang) for each in CHECKS],
                    }
                },
                "results": [_result(finding) for finding in findings],
                "columnKind": "unicodeCodePoints",
            }
        ],
    }


def _rule(id: str, severity: str, lang: str) -> dict[str, Any]:
    texts = texts_of(id, "", lang)
    return {
        "id": id,
        "shortDescription": {"text": texts["title"]},
        "fullDescription": {"text": texts["looks"]},
        "defaultConfiguration": {"level": LEVELS[severity]},
    }


def _result(finding: Finding) -> dict[str, Any]:
    index = next(place for place, each in enumerate(CHECKS) if each.id == finding.id)
    text = f"{finding.title}: {finding.evidence}. {finding.why} {finding.mend}"
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": text},
        "properties": {
            "account": finding.account,
            "gain": finding.gain.step_time,
            "basis": finding.gain.basis,
        },
    }
    if finding.file:
        place: dict[str, Any] = {"artifactLocation": {"uri": quote(Path(finding.file).as_posix())}}
        if finding.line:
            place["region"] = {"startLine": finding.line}
        result["locations"] = [{"physicalLocation": place}]
    return result
