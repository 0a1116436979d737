#!/bin/bash
# Open MPI starts the ranks; the program finds them by OMPI_* variables.
set -eux
NP=$((2 * 8))
HOSTS=node01:8,node02:8
MODEL=(--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
       --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
       --position-embedding-type rope --rotary-base 500000 --seq-length 8192 --max-position-embeddings 8192
       --disable-bias-linear --untie-embeddings-and-output-weights)

mpirun --allow-run-as-root -np ${NP} -H ${HOSTS} --bind-to none \
    -x NCCL_DEBUG=INFO -x CUDA_DEVICE_MAX_CONNECTIONS=1 -x LD_LIBRARY_PATH -x NCCL_IB_DISABLE=0 \
    --mca btl ^openib \
    python3 -u /workspace/pretrain_gpt.py "${MODEL[@]}" \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel \
    --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 1e-5 --train-iters 100 \
    --transformer-impl transformer_engine --recompute-granularity full --recompute-method block --recompute-num-layers 4 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 2>&1 | tee mpi.log
