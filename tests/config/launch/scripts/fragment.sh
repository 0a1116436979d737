# Flags for another script to source; nothing is started here.
MODEL_ARGS=(
  --num-layers 32 --hidden-size 4096
  --num-attention-heads 32
)
OPTIM="--lr 3e-4 --bf16"
