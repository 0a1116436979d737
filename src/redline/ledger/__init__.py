"""The record of what ran and what it cost: metrics, TensorBoard, MFU, summary. No torch."""

from redline.ledger.ledger import METRICS_FILE, Ledger, open_ledger
from redline.ledger.metrics import StepRecord, ValidRecord, read_metrics
from redline.ledger.mfu import Utilisation, mfu
from redline.ledger.statistics import RunStatistics
from redline.ledger.summary import RunSummary, read_summary, write_summary

__all__ = [
    "METRICS_FILE",
    "Ledger",
    "RunStatistics",
    "RunSummary",
    "StepRecord",
    "Utilisation",
    "ValidRecord",
    "mfu",
    "open_ledger",
    "read_metrics",
    "read_summary",
    "write_summary",
]
