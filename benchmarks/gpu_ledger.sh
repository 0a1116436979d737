#!/usr/bin/env bash
# The ledger's account of the 8-layer 8B shape against CUDA events, step times and faults put in on purpose.
# usage: OUT=dir benchmarks/gpu_ledger.sh     -> ledger.json in $OUT (default bench-out); one GPU, within 4 minutes
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
timeout 235 "${PYTHON:-python3}" benchmarks/gpu_ledger.py "$OUT/ledger.json" "$@" 2>&1 | tee "$OUT/ledger.txt"
echo "ledger: rc ${PIPESTATUS[0]}"
