#!/bin/bash
HOSTS=(gpu-a gpu-b)
RANK=0
for HOST in "${HOSTS[@]}"; do
    ssh -n $HOST "cd /data/Megatron-LM && NCCL_SOCKET_IFNAME=eth0 torchrun --nnodes ${#HOSTS[@]} --nproc_per_node 4 --node_rank $RANK --master_addr ${HOSTS[0]} pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --train-iters 100 --lr 6e-4 --bf16 --mock-data" &
    RANK=$((RANK + 1))
done
wait
