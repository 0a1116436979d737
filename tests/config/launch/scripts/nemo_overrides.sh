#!/bin/bash
# Options as dotted overrides of a recipe.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=2
torchrun --nnodes=$NODES --nproc-per-node=8 /opt/NeMo/examples/megatron_gpt_pretraining.py \
    --config-path=conf --config-name=megatron_gpt_config \
    trainer.devices=8 \
    trainer.num_nodes=$NODES \
    model.micro_batch_size=4 \
    model.global_batch_size=256 \
    model.tensor_model_parallel_size=2 \
    model.pipeline_model_parallel_size=1 \
    model.sequence_parallel=True \
    model.num_layers=32 \
    model.hidden_size=4096 \
    model.num_attention_heads=32 \
    model.ffn_hidden_size=11008 \
    ++model.normalization=RMSNorm \
    model.data.seq_length=4096
