#!/usr/bin/env bash
#SBATCH --job-name=k2
#SBATCH --nodes=60
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8

source ./env.sh
. "$(dirname "$0")/model/65b.sh"

function distributed_args() {
    local nodes=$1
    local gpus=${2:-8}
    echo "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    PARALLEL="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage ${VPP}"
    DP=$(( nodes * gpus / 32 ))
}

VPP=5
distributed_args 60
GBS=$(( DP * 34 ))

OPTS="${PARALLEL} ${MODEL_ARGS[*]}"
OPTS+=" --global-batch-size ${GBS} --micro-batch-size 1"
OPTS+=" --sequence-parallel --use-distributed-optimizer --bf16"
OPTS+=" --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --train-iters 350000"
OPTS+=" --data-path ${DATA_ROOT}/k2_text_document --tokenizer-type Llama2Tokenizer"

srun --export=ALL,NCCL_DEBUG=WARN -N ${SLURM_JOB_NUM_NODES} -n $(( SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE )) python ${MEGATRON}/pretrain_gpt.py ${OPTS}
