MODEL_ARGS=(
  --num-layers 80 --hidden-size 8192 --num-attention-heads 64
  --ffn-hidden-size 22016 --seq-length 2048 --max-position-embeddings 2048
  --swiglu --normalization RMSNorm --disable-bias-linear
  --position-embedding-type rope --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
)
