"""What `redline bench` measures. A figure leaves this room with commit, versions and card beside it."""

from redline.bench.record import provenance, write_result
from redline.bench.step import bench_step
from redline.bench.variants import compare_implementations, compare_operators, compare_packing
from redline.data.bench import data_index_case

__all__ = [
    "bench_step",
    "compare_implementations",
    "compare_operators",
    "compare_packing",
    "data_index_case",
    "provenance",
    "write_result",
]
