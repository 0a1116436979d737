#!/usr/bin/env bash
# Memory on one GPU: predicted against measured peaks, time and bytes of each recompute, the whole 8B, a long sequence.
# usage: OUT=dir benchmarks/gpu_memory.sh [peaks] [recompute] [whole] [long]     (default: peaks and recompute)
# `long` is one step of 512k tokens, about four minutes: give it a call of its own.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}"
PYTHON="${PYTHON:-python}"
mkdir -p "$OUT"
[ $# -eq 0 ] && set -- peaks recompute
for stage in "$@"; do
  timeout 560 "$PYTHON" benchmarks/gpu_memory.py "$stage" "$OUT/memory-$stage.json" 2>"$OUT/memory-$stage.err" | tee "$OUT/memory-$stage.md"
  tail -3 "$OUT/memory-$stage.err"
done
