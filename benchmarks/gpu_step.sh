#!/usr/bin/env bash
# Whole steps on one GPU: eager and compiled, plain and fused, CUDA graph, packed; the tests of graphs and compile.
# usage: OUT=dir benchmarks/gpu_step.sh [tests] [one] [eight] [packed]   (default: all; under 6 minutes)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python}"
COMMON="--seq-length 8192 --bf16 --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --steps 5"
[ $# -eq 0 ] && set -- tests one eight packed

tests() {
  timeout 110 "$PYTHON" -m pytest tests/step tests/build -n 6 -m "not long" -o addopts="" --import-mode=importlib -q -rs \
    > "$OUT/step-tests.txt" 2>&1
  echo "tests: rc $?"; tail -15 "$OUT/step-tests.txt"
}

one() {
  timeout 110 "$PYTHON" -m redline bench step --compare --preset llama3.2-1b --mock-data $COMMON --out "$OUT/compare-1b.json" \
    | grep -E "tokens/s|Error|why|compiled:|recorded"
}

eight() {
  timeout 140 "$PYTHON" -m redline bench step --compare --preset llama3-8b --num-layers 8 --mock-data $COMMON \
    --out "$OUT/compare-8b.json" | grep -E "tokens/s|Error|why|compiled:|recorded"
}

packed() {
  timeout 100 "$PYTHON" -m redline bench step --packed --preset llama3.2-1b --use-torch-compile $COMMON \
    --out "$OUT/packed-1b.json" | grep -E "tokens/s|Error|why|packing of"
}

for stage in "$@"; do "$stage"; done
