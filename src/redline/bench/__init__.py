"""What `redline bench` measures. A figure leaves this room with commit, versions and card beside it."""

from redline.bench.record import provenance, write_result
from redline.bench.step import bench_step
from redline.data.bench import data_index_case

__all__ = ["data_index_case", "bench_step", "provenance", "write_result"]
