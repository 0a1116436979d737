#!/usr/bin/env bash
# Several GPUs of one host, data and tensor parallel: see parallel.py for what each part does. On one GPU: gemm.
# One JSON file a part goes to $OUT, written row by row; a part that is started again goes on behind them.
# Seconds on 2 H200s: links 60, steps 330, equal 120, kill 150, comm 45, watch 45; gemm 60 on one.
# ONLY=REGEX keeps the rows whose names match, SUFFIX is added to the names of their files.
# usage: OUT=dir COMMIT=rev GPUS=2 benchmarks/gpu_parallel.sh [links] [steps] [equal] [kill] [comm] [watch] [gemm]
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}" GPUS="${GPUS:-2}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
[ $# -eq 0 ] && set -- links steps equal kill comm watch gemm

ranks() { # seconds, then parts of parallel.py that share one start; a row that hangs costs a further one
  local limit=$1; shift
  timeout -k 5 "$limit" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" --max-restarts 4 \
    benchmarks/parallel.py "$@" --out "$OUT" --only="${ONLY:-}" --suffix="${SUFFIX:-}" 2> "$OUT/parallel-${1}.log"
  local rc=$?
  tail -c 20000 "$OUT/parallel-${1}.log" > "$OUT/parallel-${1}.tail" && mv "$OUT/parallel-${1}.tail" "$OUT/parallel-${1}.log"
  [ $rc -ne 0 ] && grep -E "Error|error" "$OUT/parallel-${1}.log" | tail -5
  return $rc
}

for part in "$@"; do
  case "$part" in
    links) ranks "${LIMIT:-90}" links ;;
    steps) ranks "${LIMIT:-340}" steps ;;
    equal) ranks "${LIMIT:-160}" equal ;;
    watch) ranks "${LIMIT:-60}" watch ;;
    comm) timeout -k 5 "${LIMIT:-60}" "$PYTHON" -m redline bench comm --nproc-per-node "$GPUS" --out "$OUT/parallel-comm.json" ;;
    kill) timeout -k 5 "${LIMIT:-240}" "$PYTHON" benchmarks/parallel.py kill --gpus "$GPUS" --out "$OUT" ;;
    gemm) timeout -k 5 "${LIMIT:-60}" "$PYTHON" -m redline bench gemm --out "$OUT/parallel-gemm.json" ;;
    *) echo "no part $part" && exit 2 ;;
  esac
  echo "$part: rc $?"
done
