#!/usr/bin/env bash
# Several GPUs of one host: equality over NCCL, collectives, tokens/s by layout, a killed rank. JSON goes to $OUT.
# usage: OUT=dir GPUS=2 benchmarks/gpu_parallel.sh [equal] [comm] [kill] [steps] [gemm]     (default: all, 9 minutes)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}" GPUS="${GPUS:-2}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python}"
[ $# -eq 0 ] && set -- equal comm kill steps gemm

equal() { timeout 150 "$PYTHON" benchmarks/parallel.py equal --gpus "$GPUS" --out "$OUT/parallel-equal.json"; echo "equal: rc $?"; }

comm() {
  timeout 60 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" benchmarks/parallel.py comm \
    --out "$OUT/parallel-comm.json"
  echo "comm: rc $?"
}

kill_rank() { timeout 120 "$PYTHON" benchmarks/parallel.py kill --gpus "$GPUS" --out "$OUT/parallel-kill.json"; echo "kill: rc $?"; }

steps() { timeout 400 "$PYTHON" benchmarks/parallel.py steps --gpus "$GPUS" --out "$OUT/parallel-steps.json"; echo "steps: rc $?"; }

gemm() { timeout 60 "$PYTHON" benchmarks/parallel.py gemm --out "$OUT/parallel-gemm.json"; echo "gemm: rc $?"; }

for part in "$@"; do
  case "$part" in kill) kill_rank ;; equal | comm | steps | gemm) "$part" ;; *) echo "no part $part" && exit 2 ;; esac
done
