#!/bin/bash
# Toggles with defaults, NAME=VALUE arguments, model sizes by number.
for ARGUMENT in "$@"
do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
   KEY_LENGTH=${#KEY}
   VALUE="${ARGUMENT:$KEY_LENGTH+1}"
   export "$KEY"="$VALUE"
done

TIME_STAMP=$(date +"%Y-%m-%d_%H-%M-%S")
EXP_NAME="${EXP_NAME:-perf}"
TEE_OUTPUT="${TEE_OUTPUT:-1}"
NO_TRAINING="${NO_TRAINING:-0}"
ENABLE_PROFILING="${ENABLE_PROFILING:-0}"
NO_TORCH_COMPILE="${NO_TORCH_COMPILE:-0}"
USE_FLASH_ATTN="${USE_FLASH_ATTN:-1}"
MODEL_SIZE="${MODEL_SIZE:-70}"
TP="${TP:-8}"
PP="${PP:-1}"
MBS="${MBS:-2}"
BS="${BS:-8}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TOTAL_ITERS="${TOTAL_ITERS:-10}"
SEQ_PARALLEL="${SEQ_PARALLEL:-1}"
CONTI_PARAMS="${CONTI_PARAMS:-0}"
OPTIMIZER="${OPTIMIZER:-sgd}"
TE_FP8="${TE_FP8:-0}"

GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
MASTER_ADDR=${MASTER_ADDR:-localhost}
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

if [[ $MODEL_SIZE -eq 7 ]]; then
        HIDDEN_SIZE=4096
        FFN_HIDDEN_SIZE=11008
        NUM_LAYERS=32
        NUM_HEADS=32
        NUM_KV_HEADS=32
elif [[ $MODEL_SIZE -eq 13 ]]; then
        HIDDEN_SIZE=5120
        FFN_HIDDEN_SIZE=13824
        NUM_LAYERS=40
        NUM_HEADS=40
        NUM_KV_HEADS=40
elif [[ $MODEL_SIZE -eq 70 ]]; then
        HIDDEN_SIZE=8192
        FFN_HIDDEN_SIZE=28672
        NUM_LAYERS=80
        NUM_HEADS=64
        NUM_KV_HEADS=8
else
        echo "Model size not supported."
        exit 1
fi

GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers $NUM_LAYERS \
    --hidden-size $HIDDEN_SIZE \
    --ffn-hidden-size $FFN_HIDDEN_SIZE \
    --num-attention-heads $NUM_HEADS \
    --seq-length $SEQ_LENGTH \
    --max-position-embeddings $SEQ_LENGTH \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --no-position-embedding \
    --disable-bias-linear \
    --swiglu \
    --init-method-std 0.02 \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --normalization RMSNorm \
    --micro-batch-size $MBS \
    --global-batch-size $BS \
    --lr 3.0e-4 \
    --train-iters $TOTAL_ITERS \
    --lr-decay-style cosine \
    --min-lr 3.0e-5 \
    --bf16
"
if [ $((NUM_HEADS / NUM_KV_HEADS)) -gt 1 ]; then
    GPT_ARGS="$GPT_ARGS --group-query-attention --num-query-groups $NUM_KV_HEADS"
fi

TRAIN_ARGS="--no-gradient-accumulation-fusion --overlap-grad-reduce"
DATA_ARGS="--mock-data --tokenizer-type NullTokenizer --vocab-size 32000"

EXTRA_ARGS="
    --num-workers 8 \
    --distributed-backend nccl \
    --distributed-timeout-minutes 30
"
if [ "$ENABLE_PROFILING" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --profile --use-pytorch-profiler --tensorboard-dir $LOG_DIR"
fi
if [ "$USE_FLASH_ATTN" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --use-flash-attn"
fi
if [ "$SEQ_PARALLEL" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --sequence-parallel"
fi
if [ "$OPTIMIZER" == "adam" ]; then
    EXTRA_ARGS="$EXTRA_ARGS --optimizer adam --use-distributed-optimizer"
else
    EXTRA_ARGS="$EXTRA_ARGS --optimizer sgd"
fi
if [ "$TE_FP8" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --transformer-impl=transformer_engine --fp8-margin=0 --fp8-format=hybrid"
fi

run_cmd="
    torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
        $GPT_ARGS \
        $DATA_ARGS \
        $TRAIN_ARGS \
        $EXTRA_ARGS
"
if [ "$TEE_OUTPUT" -eq 0 ]; then
    run_cmd="$run_cmd >& train.log"
else
    run_cmd="$run_cmd |& tee train.log"
fi
if [ "$NO_TRAINING" -eq 0 ]; then
    eval $run_cmd
fi
