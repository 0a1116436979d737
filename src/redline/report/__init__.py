"""Runs as text for people: log lines, a live display, the printed summary. No torch."""

from redline.report.kernels import print_kernels
from redline.report.ledger_text import print_account, waterfall_view
from redline.report.progress import TrainProgress
from redline.report.text import print_summary, step_line, summary_view, valid_line

__all__ = [
    "TrainProgress",
    "print_account",
    "print_kernels",
    "print_summary",
    "step_line",
    "summary_view",
    "valid_line",
    "waterfall_view",
]
