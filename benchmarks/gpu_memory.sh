#!/usr/bin/env bash
# Memory on one GPU: predicted against measured peaks, time and bytes of each recompute, the whole 8B, a long sequence.
# usage: OUT=dir benchmarks/gpu_memory.sh [tests] [peaks | peaks:PART/PARTS] [recompute] [whole] [long]
#        (default: peaks and recompute; `peaks:0/2` and `peaks:1/2` share the list between two GPUs,
#        `peaks:0/1:fp8` runs those with fp8 alone, `peaks:0/1:compile` the compiled blocks)
# `long` is one step of 512k tokens, about three minutes.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}"
PYTHON="${PYTHON:-python}"
mkdir -p "$OUT"
[ $# -eq 0 ] && set -- peaks recompute
for words in "$@"; do
  IFS=: read -r stage part word <<<"$words"
  name="memory-$stage${part:+-${part//\//of}}${word:+-$word}"
  if [ "$stage" = tests ]; then
    timeout 120 "$PYTHON" -m pytest -q -m gpu tests/model/test_offload.py 2>&1 | tail -15 | tee "$OUT/$name.txt"
    continue
  fi
  # shellcheck disable=SC2086
  timeout "${LIMIT:-400}" "$PYTHON" benchmarks/gpu_memory.py "$stage" "$OUT/$name.json" $part $word 2>"$OUT/$name.err" | tee "$OUT/$name.md"
  tail -3 "$OUT/$name.err"
done
