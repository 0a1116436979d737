#!/usr/bin/env bash
# The fused operators on one GPU: tests, timings, whole steps. Results go to $OUT as JSON and XML.
# usage: OUT=dir benchmarks/gpu_kernels.sh [tests] [kernels] [steps]   (default: all three, kernels with --quick)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python}"
quick=""
[ $# -eq 0 ] && { set -- tests kernels steps; quick=--quick; }

tests() {
  timeout 240 "$PYTHON" -m pytest tests/kernels tests/model tests/optim tests/attention tests/bench -n 10 -o addopts="" \
    --import-mode=importlib -q -rs --junitxml="$OUT/tests.xml" > "$OUT/tests.txt" 2>&1
  echo "tests: rc $?"; tail -15 "$OUT/tests.txt"
}

kernels() {
  timeout 420 "$PYTHON" -m redline bench kernels $quick --out "$OUT/kernels.json"
  echo "kernels: rc $?"
}

steps() {
  for impl in local fused; do
    for model in "llama3-8b --num-layers 8" "llama3.2-1b"; do
      timeout 150 "$PYTHON" -m redline bench step --preset $model --transformer-impl $impl --seq-length 8192 --mock-data \
        --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --bf16 --attention-backend fused \
        --steps 8 --out "$OUT/step-${model%% *}-$impl.json"
      echo "$model $impl: rc $?"
    done
  done
}

for stage in "$@"; do "$stage"; done
