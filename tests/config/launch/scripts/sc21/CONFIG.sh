#!/bin/bash
export SLURM_PARTITION=big
export MEGATRON_CODE_DIR=/opt/megatron
export DOCKER_MOUNT_DIR=/data

BPE_VOCAB_FILE=/data/vocab.json
export MEGATRON_PARAMS=" \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --num-layers ${NLS} \
    --hidden-size ${HS} \
    --num-attention-heads ${NAH} \
    --DDP-impl ${DDP} \
    --data-path /data/gpt3_text_document \
    --vocab-file ${BPE_VOCAB_FILE} \
    --log-interval 5 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --train-iters 500 \
    --lr-decay-iters 320 \
    --lr 0.0001 \
    --min-lr 0.00001 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 \
    --split 969,30,1 \
    --eval-iters 100 \
    --eval-interval 1000 \
    --clip-grad 1.0 \
    --fp16 \
    --loss-scale 8192 ${MEGATRON_EXTRA_PARAMS}"
