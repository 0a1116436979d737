#!/bin/bash
source ${CONDA_PREFIX:-/opt/conda}/etc/profile.d/conda.sh
export OMP_NUM_THREADS=8 NCCL_DEBUG=WARN
ARGS="--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --swiglu --position-embedding-type rope"
ARGS="${ARGS} --micro-batch-size 8 --global-batch-size 512 --seq-length 4096 --max-position-embeddings 4096 --train-iters 10 --lr 4e-4 --bf16 --mock-data"
accelerate launch --num_processes 32 --num_machines 4 --machine_rank ${MACHINE_RANK} --main_process_ip ${MAIN_IP} pretrain_gpt.py ${ARGS}
