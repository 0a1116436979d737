#!/bin/bash
# 13B with ZeRO-1, deepspeed launcher, configuration written on the fly.
DIR=`pwd`
BASE_DATA_PATH=datasets
DATASET=${BASE_DATA_PATH}/corpus_text_document
TOKENIZER_PATH=datasets/tokenizer.model

DS_CONFIG=ds_config.json
TP=2
PP=4
ZERO_STAGE=1
GPUS_PER_NODE=8
NUM_NODES=4

HIDDEN_SIZE=5120
FFN_HIDDEN_SIZE=13824
NUM_LAYERS=40
NUM_HEADS=40
SEQ_LENGTH=4096
NUM_KV_HEADS=40
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=256
TRAIN_STEPS=250000
LR=3e-4

# Below configuration required for llama model as per llama paper
activation_checkpoint="true"

cat <<EOT > $DS_CONFIG
{
  "train_batch_size" : $GLOBAL_BATCH_SIZE,
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE,
  "steps_per_print": 1,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT

ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"

if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
  ## old argument for recomputing the transformer layer
  ds_args="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ${ds_args}"
fi

deepspeed --num_nodes $NUM_NODES --num_gpus $GPUS_PER_NODE --master_port 29501 \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TP \
       --pipeline-model-parallel-size $PP \
       --num-layers $NUM_LAYERS \
       --hidden-size $HIDDEN_SIZE \
       --ffn-hidden-size $FFN_HIDDEN_SIZE \
       --num-attention-heads $NUM_HEADS \
       --micro-batch-size $MICRO_BATCH_SIZE \
       --global-batch-size $GLOBAL_BATCH_SIZE \
       --seq-length $SEQ_LENGTH \
       --max-position-embeddings $SEQ_LENGTH \
       --train-iters $TRAIN_STEPS \
       --save checkpoints/13b \
       --data-path $DATASET \
       --data-impl mmap \
       --tokenizer-type GPTSentencePieceTokenizer \
       --tokenizer-model $TOKENIZER_PATH \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr $LR \
       --lr-decay-style cosine \
       --min-lr 3e-5 \
       --weight-decay 0.1 \
       --clip-grad 1 \
       --lr-warmup-iters 2000 \
       --optimizer adam \
       --adam-beta1 0.9 \
       --adam-beta2 0.95 \
       --log-interval 1 \
       --save-interval 10000 \
       --eval-interval 1000 \
       --eval-iters 10 \
       --bf16 \
       --no-query-key-layer-scaling \
       --attention-dropout 0 \
       --hidden-dropout 0 \
       --use-rotary-position-embeddings \
       --untie-embeddings-and-output-weights \
       --swiglu \
       --normalization rmsnorm \
       --disable-bias-linear \
       --num-key-value-heads $NUM_KV_HEADS \
       $ds_args
