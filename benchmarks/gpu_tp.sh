#!/usr/bin/env bash
# Tensor and sequence parallelism on 2 GPUs of one machine. Results go to $OUT (default bench-out) as JSON.
# usage: OUT=dir COMMIT=rev benchmarks/gpu_tp.sh [equality] [steps] [symmetric] [auto]
#   equality   over NCCL, every overlap beside one GPU -> tp-equality-all.json                         (1 minute)
#   steps      tokens/s of the 8-layer 8B shape and the 1B: tp, sp, overlap off, in 2, 4, 8 pieces -> tp-steps-*.json (2 minutes)
#   symmetric  equality and the same steps by symmetric memory -> tp-symmetric-*.json                  (1 minute)
#   auto       the same steps with the method measured at the start -> tp-symmetric-*-auto.json        (1 minute)
# NVLink multicast stays off: the variables below are set if they are not.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
[ $# -eq 0 ] && set -- equality steps symmetric auto

go() { # seconds, then the words of tp_steps.py
  local limit=$1; shift
  timeout "$limit" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" benchmarks/tp_steps.py "$@" \
    2> "$OUT/tp-$1-${2:-all}.log"
  local rc=$?
  echo "tp $*: rc $rc"; [ $rc -ne 0 ] && grep -E "Error|error" "$OUT/tp-$1-${2:-all}.log" | tail -5
}

equality() { go 100 equality; }
steps() { go 100 steps 8b; go 80 steps 1b; }
symmetric() { go 60 symmetric equality; go 60 symmetric 8b; go 50 symmetric 1b; }
auto() { export TP_AUTO=1; go 60 symmetric 8b; go 50 symmetric 1b; unset TP_AUTO; }

for stage in "$@"; do "$stage"; done
