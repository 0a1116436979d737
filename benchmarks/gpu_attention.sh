#!/usr/bin/env bash
# Attention on one GPU. Results go to $OUT (default bench-out) as JSON, row by row as they come, logs beside them.
# usage: OUT=dir COMMIT=rev benchmarks/gpu_attention.sh [tests] [bench] [full] [tune] [steps]
#   tests  attention's tests on this card, against float64 -> attention-tests.xml              (3.5 minutes)
#   bench  every backend on a few shapes -> attention-quick.json                                (1 minute)
#   full   the whole grid: head 64 and 128, 1k to 64k, MHA and GQA, packed or not, and whether auto takes the
#          best -> attention.json                                                               (4 minutes)
#   tune   other tiles for Redline's own kernels -> attention-tiles.json                        (up to 9 minutes)
#   steps  the 8-layer 8B step by backend, eager, attention in place beside alone -> step-attention-*.json
#                                                                                               (1 minute)
# With no stage named: tests and bench. A FlashAttention package on PYTHONPATH takes part.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
# FlashAttention 4 compiles at its first call; kept on disk, one process' work serves the next.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
[ $# -eq 0 ] && set -- tests bench

tests() {
  # An interrupted pytest still says which tests failed so far, and why.
  timeout -s INT -k 20 "${LIMIT:-210}" "$PYTHON" -m pytest tests/attention -n "${WORKERS:-12}" -o addopts="" -v \
    --import-mode=importlib --durations=5 -W ignore --junitxml="$OUT/attention-tests.xml" > "$OUT/attention-tests.txt" 2>&1
  echo "tests: rc $?"; grep -E "FAILED|^E  |passed|failed" "$OUT/attention-tests.txt" | tail -40
}

measure() { # seconds, result, words of `redline bench attention`
  local limit=$1 name=$2; shift 2
  timeout "$limit" "$PYTHON" -m redline bench attention "$@" --commit "$COMMIT" --out "$OUT/$name.json" > "$OUT/$name.txt" 2>&1
  echo "$name: rc $?"; grep -E "TFLOP/s;|compiled, in|Error|why:" "$OUT/$name.txt" | tail -45
}

bench() { measure 140 attention-quick --quick; }
full() { measure 290 attention; }

tune() {
  timeout 580 "$PYTHON" benchmarks/tune_attention.py --head ${TUNE_HEAD:-128} \
    --kernel ${TUNE_KERNEL:-forward dq dkv} --out "$OUT/attention-tiles.json" \
    > "$OUT/attention-tiles.txt" 2>&1
  echo "tune: rc $?"; tail -30 "$OUT/attention-tiles.txt"
}

steps() {
  for backend in ${BACKENDS:-flash fused local}; do
    timeout 90 "$PYTHON" -m redline bench step --preset llama3-8b --num-layers 8 --seq-length 8192 --mock-data --bf16 \
      --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --attention-backend "$backend" \
      --steps 5 --commit "$COMMIT" --out "$OUT/step-attention-$backend.json" > "$OUT/step-attention-$backend.txt" 2>&1
    echo "steps $backend: rc $?"; grep -E "tokens/s|Error|why" "$OUT/step-attention-$backend.txt"
  done
}

for stage in "$@"; do "$stage"; done
