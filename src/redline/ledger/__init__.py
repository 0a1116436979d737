"""What ran and what it cost: metrics, TensorBoard, MFU, summary, and the account of profiled steps. No torch.

Reading traces stands apart (`redline.ledger.take`): it needs numpy, which the doctor starts faster without.
"""

from redline.ledger.account import (
    LEDGER_FILE,
    Loss,
    ModuleRow,
    OperatorRow,
    RankAccount,
    Reference,
    Spread,
    StepAccount,
    read_account,
    write_account,
)
from redline.ledger.causes import CAUSES, Cause
from redline.ledger.ledger import FP8_FILE, METRICS_FILE, Ledger, open_ledger
from redline.ledger.metrics import StepRecord, ValidRecord, perplexity, read_metrics
from redline.ledger.mfu import Utilisation, mfu
from redline.ledger.ranks import join_ranks
from redline.ledger.skew import Skew
from redline.ledger.statistics import RunStatistics
from redline.ledger.summary import RunSummary, read_memory_summary, read_summary, write_summary
from redline.ledger.vocabulary import recorded_vocab_size, stated_vocab_size

__all__ = [
    "CAUSES",
    "FP8_FILE",
    "LEDGER_FILE",
    "METRICS_FILE",
    "Cause",
    "Ledger",
    "Loss",
    "ModuleRow",
    "OperatorRow",
    "RankAccount",
    "Reference",
    "RunStatistics",
    "RunSummary",
    "Skew",
    "Spread",
    "StepAccount",
    "StepRecord",
    "Utilisation",
    "ValidRecord",
    "join_ranks",
    "mfu",
    "open_ledger",
    "perplexity",
    "read_account",
    "read_memory_summary",
    "read_metrics",
    "read_summary",
    "recorded_vocab_size",
    "stated_vocab_size",
    "write_account",
    "write_summary",
]
