#!/bin/bash
# A grid of layouts, one after the other.
COMMON="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
COMMON="$COMMON --train-iters 50 --lr 1e-4 --fp16 --mock-data --vocab-size 50257 --tokenizer-type NullTokenizer"
train() {
    local tp=$1 pp=$2
    local name="tp${tp}_pp${pp}"
    torchrun --nproc_per_node=8 pretrain_gpt.py $COMMON \
        --tensor-model-parallel-size $tp --pipeline-model-parallel-size $pp \
        --micro-batch-size 4 --global-batch-size 64 --tensorboard-dir "tb/$name" > logs/$name.txt
}
for tp in 1 2 4; do
    for pp in 1 2; do
        [[ $((tp * pp)) -le 8 ]] || continue
        train $tp $pp
    done
done
