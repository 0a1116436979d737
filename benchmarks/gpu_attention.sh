#!/usr/bin/env bash
# Attention on one GPU: tests against float64, the bench, whole steps by backend. Results go to $OUT as JSON, XML.
# usage: OUT=dir benchmarks/gpu_attention.sh [tests] [bench] [full] [tune] [steps]   (default: tests and bench, 6 minutes)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python}"
[ $# -eq 0 ] && set -- tests bench

tests() {
  timeout 210 "$PYTHON" -m pytest tests/attention -n "${WORKERS:-12}" -o addopts="" --import-mode=importlib -q -rs \
    --durations=5 --junitxml="$OUT/attention-tests.xml" > "$OUT/attention-tests.txt" 2>&1
  echo "tests: rc $?"; tail -40 "$OUT/attention-tests.txt"
}

bench() {
  timeout 140 "$PYTHON" -m redline bench attention --quick --out "$OUT/attention-quick.json"
  echo "bench: rc $?"
}

full() {
  timeout 580 "$PYTHON" -m redline bench attention --out "$OUT/attention.json"
  echo "full: rc $?"
}

tune() {
  timeout 580 "$PYTHON" benchmarks/tune_attention.py --head ${TUNE_HEAD:-128} --out "$OUT/attention-tiles.json"
  echo "tune: rc $?"
}

steps() {
  for backend in flash fused local; do
    timeout 120 "$PYTHON" -m redline bench step --preset llama3-8b --num-layers 8 --seq-length 8192 --mock-data \
      --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --bf16 --attention-backend $backend \
      --steps 6 --out "$OUT/step-attention-$backend.json"
    echo "steps $backend: rc $?"
  done
}

for stage in "$@"; do "$stage"; done
