export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_HCA=mlx5_0,mlx5_1
export MEGATRON=/opt/megatron
DATA_ROOT=/data/k2
