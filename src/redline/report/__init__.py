"""Runs as text for people: log lines, a live display, the printed summary. No torch."""

from redline.report.progress import TrainProgress
from redline.report.text import print_summary, step_line, summary_view, valid_line

__all__ = ["TrainProgress", "print_summary", "step_line", "summary_view", "valid_line"]
