#!/usr/bin/env bash
# fp8 on one GPU: the tests on this card, then whole steps in bf16 and fp8. Results go to $OUT (default bench-out).
# usage: OUT=dir COMMIT=rev benchmarks/gpu_fp8.sh [tests] [steps] [casts] [tune]
#   tests   casts, sites, GEMMs, whole runs by each recipe -> fp8-tests.txt          (1 minute)
#   steps   the 8-layer 8B shape and the 1B, bf16 and fp8 -> fp8-step-*.json        (5 minutes)
#           or some of them: STEPS="8b-bf16 8b-fp8" benchmarks/gpu_fp8.sh steps
#   casts   share of copy bandwidth of each cast -> fp8-casts.json                  (1 minute)
#   tune    the casts under other tiles, beside copies of their size -> fp8-tune.json (1 minute)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
[ $# -eq 0 ] && set -- tests steps casts

tests() {
  timeout 180 "$PYTHON" -m pytest tests/kernels/test_fp8.py tests/kernels/test_fp8_blocks.py tests/model/test_fp8.py \
    tests/precision tests/integration/test_fp8_gpu.py -n 8 -o addopts="" --import-mode=importlib -q -rs \
    > "$OUT/fp8-tests.txt" 2>&1
  echo "fp8 tests: rc $?"; grep -E "^(E  |FAILED|ERROR)" "$OUT/fp8-tests.txt" | cut -c1-200 | head -20; tail -3 "$OUT/fp8-tests.txt"
}

step() { # name, then flags
  local name=$1; shift
  [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $name "* ]] && return
  timeout 120 "$PYTHON" -m redline bench step "$@" --seq-length 8192 --mock-data --train-iters 20 --eval-iters 0 --bf16 \
    --steps 6 --commit "$COMMIT" --out "$OUT/fp8-step-$name.json" > "$OUT/fp8-step-$name.txt" 2>&1
  echo "$name: rc $?"; tail -12 "$OUT/fp8-step-$name.txt" | grep -E "tok|MFU|rror" | head -6
}

steps() {
  local large="--preset llama3-8b --num-layers 8" small="--preset llama3.2-1b"
  step 8b-bf16 $large --micro-batch-size 1 --global-batch-size 4
  step 8b-fp8 $large --micro-batch-size 1 --global-batch-size 4 --fp8
  step 8b-fp8-beside $large --micro-batch-size 1 --global-batch-size 4 --fp8 --no-fp8-param-gather
  step 8b-fp8-mbs2 $large --micro-batch-size 2 --global-batch-size 4 --fp8
  step 8b-bf16-mbs2 $large --micro-batch-size 2 --global-batch-size 4
  step 8b-bf16-mbs4 $large --micro-batch-size 4 --global-batch-size 4
  step 8b-fp8-mbs4 $large --micro-batch-size 4 --global-batch-size 4 --fp8
  step 8b-fp8-head $large --micro-batch-size 4 --global-batch-size 4 --fp8 --fp8-output-proj
  step 1b-bf16 $small --micro-batch-size 2 --global-batch-size 2
  step 1b-fp8 $small --micro-batch-size 2 --global-batch-size 2 --fp8
  step 1b-fp8-blockwise $small --micro-batch-size 2 --global-batch-size 2 --fp8-e4m3 --fp8-recipe blockwise
}

casts() {
  timeout 100 "$PYTHON" -m redline bench kernels --only fp8 --commit "$COMMIT" --out "$OUT/fp8-casts.json"
  echo "casts: rc $?"
}

tune() {
  COMMIT="$COMMIT" timeout 100 "$PYTHON" benchmarks/tune_fp8.py "$OUT/fp8-tune.json"
  echo "tune: rc $?"
}

for stage in "$@"; do "$stage"; done
(cd "$OUT" && tar czf fp8.tar.gz --exclude=fp8.tar.gz fp8-* && rm -f fp8-*.txt)
