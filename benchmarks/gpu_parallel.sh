#!/usr/bin/env bash
# Several GPUs of one host: equality over NCCL, collectives, a killed rank, tokens/s by layout; on one GPU: weight
# gradients and flat buffers. One JSON file a part goes to $OUT. On 2 GPUs the first four take 4 minutes at most, gemm 1.
# usage: OUT=dir GPUS=2 benchmarks/gpu_parallel.sh [equal] [steps] [comm] [kill] [gemm]               (default: all)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-bench-out}" GPUS="${GPUS:-2}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python}"
[ $# -eq 0 ] && set -- equal steps comm kill gemm

job=()  # what one start of the ranks does
for part in "$@"; do case "$part" in equal | steps) job+=("$part") ;; esac; done
if [ ${#job[@]} -gt 0 ]; then
  timeout 130 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" benchmarks/parallel.py "${job[@]}" \
    --out "$OUT"
  echo "${job[*]}: rc $?"
fi
for part in "$@"; do
  case "$part" in
    equal | steps) continue ;;
    comm) timeout 45 "$PYTHON" -m redline bench comm --nproc-per-node "$GPUS" --out "$OUT/parallel-comm.json" ;;
    kill) timeout 65 "$PYTHON" benchmarks/parallel.py kill --gpus "$GPUS" --out "$OUT" ;;
    gemm) timeout 60 "$PYTHON" -m redline bench gemm --out "$OUT/parallel-gemm.json" ;;
    *) echo "no part $part" && exit 2 ;;
  esac
  echo "$part: rc $?"
done
