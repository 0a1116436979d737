#!/bin/bash

# One point of a weak-scaling figure: settings here, submission in SBATCH.sh, the command in SRUN.sh.

# Pipeline-parallel size options = [2, 4, 8, 16, 32].
PP=8
# Batch size (global batch size) options = [8, 128].
GBS=128

# Set pipeline-parallel size options.
NLS=$((3*PP))
NNODES=${PP}

# Other params.
TP=8
MBS=1
HS=20480
NAH=128
DDP=local
MEGATRON_EXTRA_PARAMS="--activations-checkpoint-method uniform "

# Name of the job.
export JOB_NAME=results_figure_PP_${PP}_GBS_${GBS}

# Import the configs.
. `pwd`/CONFIG.sh

# Submit the job.
. `pwd`/SBATCH.sh

exit 0
