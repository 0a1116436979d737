#!/bin/bash
# Sizes are chosen by commenting in and out; the command is a variable.
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs

script_path=$(realpath $0)
script_dir=$(dirname $script_path)
CONFIG_JSON="$script_dir/ds_config.json"

ZERO_STAGE=1

# Debug
#TP=4
#PP=4
#LAYERS=8
#HIDDEN=512
#SEQ=1024
#GLOBAL_BATCH=128
#WORKER_STR="-i worker-0"

# 52B
TP=4
PP=16
HIDDEN=8192
LAYERS=64
SEQ=1024
GLOBAL_BATCH=1024
WORKER_STR=""

MICRO_BATCH=4
LR=6.0e-5
MIN_LR=6.0e-6
VOCAB_PATH=gpt2-vocab.json

DATASET_1="corpus/books_text_document"
DATASET_2="corpus/web_text_document"
DATASET="0.4 ${DATASET_1} 0.6 ${DATASET_2}"

options=" \
	--tensor-model-parallel-size $TP \
	--pipeline-model-parallel-size $PP \
        --num-layers $LAYERS \
        --hidden-size $HIDDEN \
        --num-attention-heads 32 \
        --seq-length $SEQ \
        --loss-scale 12 \
        --max-position-embeddings $SEQ \
	--micro-batch-size $MICRO_BATCH \
	--global-batch-size $GLOBAL_BATCH \
	--train-iters 1000 \
        --lr $LR \
	--min-lr $MIN_LR \
        --lr-decay-style cosine \
        --log-interval 1 \
        --eval-iters 40 \
        --eval-interval 10 \
	--data-path ${DATASET} \
	--vocab-file ${VOCAB_PATH} \
	--save-interval 1000 \
        --split 98,2,0 \
        --clip-grad 1.0 \
	--weight-decay 0.1 \
        --adam-beta1 0.9 \
        --adam-beta2 0.95 \
        --init-method-std 0.006 \
        --fp16 \
	--checkpoint-activations
        "

options="${options} \
	--deepspeed \
	--deepspeed_config=${CONFIG_JSON} \
	--zero-stage=${ZERO_STAGE} \
"
checkpoint_activations=${checkpoint_activations:-yes}
[[ $checkpoint_activations == yes ]] && options="${options} --deepspeed-activation-checkpointing"

run_cmd="deepspeed --num_nodes=8 --num_gpus=16 $WORKER_STR ${DIR}/pretrain_gpt.py $@ ${options}"

echo ${run_cmd}
eval ${run_cmd}

set +x
