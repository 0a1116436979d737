#!/usr/bin/env bash
# The operator sets PET_*; further flags may follow on the command line.
set -euo pipefail

: "${PET_NNODES:?set by the operator}"
NPROC=${PET_NPROC_PER_NODE:-8}
RUN_ID=${RUN_ID:=llama-1b}
MODEL=${MODEL:-llama-1b}

declare -A LAYERS=( [llama-1b]=16 [llama-3b]=28 )
declare -A HIDDEN=( [llama-1b]=2048 [llama-3b]=3072 )
declare -A HEADS
HEADS[llama-1b]=32
HEADS[llama-3b]=24

model_args() {
  local name="$1"
  case "$name" in
    llama-*)
      ARGS=(--num-layers "${LAYERS[$name]}" --hidden-size "${HIDDEN[$name]}" --num-attention-heads "${HEADS[$name]}")
      ARGS+=(--group-query-attention --num-query-groups 8 --ffn-hidden-size 8192 --swiglu)
      ;;
    *)
      echo "unknown model $name" >&2
      return 1
      ;;
  esac
}

model_args "$MODEL"
RUN_ID=${RUN_ID%-1b}

CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=0 exec torchrun \
  --nnodes="${PET_NNODES}" --nproc-per-node="${NPROC}" \
  --rdzv-backend=c10d --rdzv-endpoint="${PET_MASTER_ADDR}:${PET_MASTER_PORT}" \
  -m megatron.training.pretrain_gpt \
  "${ARGS[@]}" \
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm \
  --micro-batch-size 2 --global-batch-size 512 --bf16 --lr 3e-4 --train-iters 100000 \
  --save "/ckpt/${RUN_ID}" --wandb-project k8s --wandb-exp-name "run of ${RUN_ID}" --mock-data --vocab-size 128256 --tokenizer-type NullTokenizer \
  "$@"
