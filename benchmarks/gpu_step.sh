#!/usr/bin/env bash
# Whole steps on one GPU: eager and compiled, plain and fused, CUDA graph, attention in place; packed against dense.
# usage: OUT=dir COMMIT=rev benchmarks/gpu_step.sh [tests] [one] [eight] [packed]   (default: all; 8 minutes)
#   tests   the tests of graphs and of torch.compile -> step-tests.txt                           (2 minutes)
#   one     the 1B five ways -> compare-1b.json                                                  (2 minutes)
#   eight   the 8-layer 8B shape five ways -> compare-8b.json                                    (2.5 minutes)
#   packed  skewed documents packed beside dense samples, 1B, compiled -> packed-1b.json         (1.5 minutes)
# Results go to $OUT (default bench-out), row by row as they come, logs beside them.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
COMMON="--seq-length 8192 --bf16 --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --steps 5"
[ $# -eq 0 ] && set -- tests one eight packed

tests() {
  timeout 110 "$PYTHON" -m pytest tests/step tests/build -n 6 -m "not long" -o addopts="" --import-mode=importlib -q -rs \
    > "$OUT/step-tests.txt" 2>&1
  echo "tests: rc $?"; tail -15 "$OUT/step-tests.txt"
}

measure() { # seconds, result, words of `redline bench step`
  local limit=$1 name=$2; shift 2
  timeout "$limit" "$PYTHON" -m redline bench step "$@" $COMMON --commit "$COMMIT" --out "$OUT/$name.json" > "$OUT/$name.txt" 2>&1
  echo "$name: rc $?"; grep -E "tokens/s|Error|why|compiled:|recorded|packing of" "$OUT/$name.txt"
}

one() { measure 170 compare-1b --compare --preset llama3.2-1b --mock-data; }
eight() { measure 200 compare-8b --compare --preset llama3-8b --num-layers 8 --mock-data; }
packed() { measure 120 packed-1b --packed --preset llama3.2-1b --use-torch-compile; }

for stage in "$@"; do "$stage"; done
