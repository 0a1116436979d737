set -x

mkdir -p /share/run/checkpoints
mkdir -p /share/run/logs

cd /share/FlagScale

export PYTHONPATH=/share/FlagScale:${PYTHONPATH}
export CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"
export CUDA_DEVICE_MAX_CONNECTIONS="1"
cmd="torchrun --nnodes 4 --node_rank 0 --nproc_per_node 8 --rdzv_id default --rdzv_backend static --master_addr 10.0.0.1 --master_port 29500 flagscale/train/train_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-flash-attn --use-distributed-optimizer --bf16 --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --num-layers 48 --hidden-size 6144 --ffn-hidden-size 24576 --num-attention-heads 48 --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --norm-epsilon 1e-5 --position-embedding-type rope --no-position-embedding --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --init-method-std 0.0165 --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 --clip-grad 1.0 --train-samples 976562 --micro-batch-size 2 --global-batch-size 1024 --lr 2e-4 --min-lr 2e-5 --lr-warmup-samples 195312 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 100008 --make-vocab-size-divisible-by 64 --log-interval 1"

nohup bash -c "$cmd; sync" >> /share/run/logs/host_0.output 2>&1 & echo $! > /share/run/logs/host_0.pid
