"""Prints, as JSON, how fast sample indices are built: `python benchmarks/data_index.py [TOKENS]`."""

from __future__ import annotations

import json
import sys

from redline.data.bench import data_index_case

if __name__ == "__main__":
    sizes = {"num_tokens": int(sys.argv[1])} if len(sys.argv) > 1 else {}
    print(json.dumps(data_index_case(**sizes), indent=2))
