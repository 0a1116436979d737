"""Why a job is slow and what to change: checks over a launch, a machine or a run. No torch.

`diagnose(case)` runs every check of CHECKS and predicts each mend by plan/'s cost model. A check is one small
function in doctor/checks/, its texts stand in doctor/texts/, one file a language.
"""

from redline.doctor.case import Case, merge
from redline.doctor.checks import CHECKS
from redline.doctor.diagnose import Diagnosis, change_text, combined, diagnose, explained
from redline.doctor.facts import facts_of
from redline.doctor.finding import SEVERITIES, Finding, Gain, Hit, Mend
from redline.doctor.machine import Gpu, Machine, live_machine
from redline.doctor.messages import LANGUAGES, phrases, texts_of
from redline.doctor.patch import Patch, patch_launch
from redline.doctor.registry import Check
from redline.doctor.reports import read_nccl_log, read_nvidia_smi, read_topology, read_xids
from redline.doctor.runs import RunRecord, read_run
from redline.doctor.sarif import sarif

__all__ = [
    "CHECKS",
    "LANGUAGES",
    "SEVERITIES",
    "Case",
    "Check",
    "Diagnosis",
    "Finding",
    "Gain",
    "Gpu",
    "Hit",
    "Machine",
    "Mend",
    "Patch",
    "RunRecord",
    "change_text",
    "combined",
    "diagnose",
    "explained",
    "facts_of",
    "live_machine",
    "merge",
    "patch_launch",
    "phrases",
    "read_nccl_log",
    "read_nvidia_smi",
    "read_run",
    "read_topology",
    "read_xids",
    "sarif",
    "texts_of",
]
