#!/usr/bin/env bash
# Several GPUs of one host, data and tensor parallel: see parallel.py for what each part does. On one GPU: gemm.
# One call does what it can within TOTAL seconds, the most important first: each stage has its limit, or what is
# left; what is cut says so. A JSON file a stage goes to $OUT, written row by row, and parallel.log with what was
# said and, where a stage or a row was cut, the stacks of all ranks. Stages may be named instead of all.
# ONLY=REGEX keeps the rows whose names match, SUFFIX is added to the names of their files, LIMIT is a stage's.
# DRY=1 takes tiny models and, without GPUs, processes that talk over gloo.
# usage: OUT=dir COMMIT=rev GPUS=4 benchmarks/gpu_parallel.sh [equal] [steps] [kill] [ctas] [comm] [watch] [links]
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}" GPUS="${GPUS:-2}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
PYTHON="${PYTHON:-python3}" TOTAL="${TOTAL:-530}" LOG="$OUT/parallel.log" DRY="${DRY:+--dry}"
mkdir -p "$OUT"
STACKS="$(mktemp -d)"
trap 'rm -rf "$STACKS"' EXIT
[ $# -eq 0 ] && set -- equal steps kill ctas comm watch links

stage() { # name, most seconds, command; @UNTIL in it is when it should have ended by itself
  local name=$1 limit=${LIMIT:-$2} left=$((TOTAL - SECONDS)); shift 2
  ((limit > left)) && limit=$left
  ((limit < 25)) && { echo "== $name: no time left at $SECONDS s" | tee -a "$LOG"; return; }
  echo "== $name: from $SECONDS s, up to $limit s" | tee -a "$LOG"
  timeout -k 5 "$limit" "${@/@UNTIL/$(($(date +%s) + limit - 8))}" 2>> "$LOG" | tee -a "$LOG"
  local rc=${PIPESTATUS[0]}
  if [ -n "$(find "$STACKS" -type f -size +0)" ]; then tail -n +1 "$STACKS"/* >> "$LOG"; rm -f "$STACKS"/*; fi
  echo "== $name: rc $rc" | tee -a "$LOG"
}

ranks() { # part, seconds, more arguments; a row that hangs costs a further start
  local part=$1 limit=$2; shift 2
  stage "$part" "$limit" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" --max-restarts 4 \
    benchmarks/parallel.py "$part" --out "$OUT" --only="${ONLY:-}" --suffix="${SUFFIX:-}" --until @UNTIL \
    --stacks "$STACKS" $DRY "$@"
}

for part in "$@"; do
  case "$part" in
    equal) ranks equal 170 ;;
    steps) ranks steps 190 ;;
    kill) stage kill 90 "$PYTHON" benchmarks/parallel.py kill --gpus "$GPUS" --out "$OUT" $DRY ;;
    ctas) NCCL_MAX_CTAS=8 SUFFIX=-ctas8 ONLY="^(1b|8b), ($GPUS GPUs, sharded|tp $GPUS, sp|tp $GPUS, sp, pushed)$" ranks steps 50 ;;
    comm) stage comm 50 "$PYTHON" -m redline bench comm --nproc-per-node "$GPUS" --out "$OUT/parallel-comm.json" ;;
    watch) ranks watch 40 ;;
    links) ranks links 90 ;;
    gemm) stage gemm 60 "$PYTHON" -m redline bench gemm --out "$OUT/parallel-gemm.json" ;;
    *) echo "no part $part" && exit 2 ;;
  esac
done
