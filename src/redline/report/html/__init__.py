"""The report of one run or several as one self-contained HTML page. No torch, no network."""

from redline.report.html.page import Page, make_page, render, write_page
from redline.report.html.runs import RunData, read_runs

__all__ = ["Page", "RunData", "make_page", "read_runs", "render", "write_page"]
