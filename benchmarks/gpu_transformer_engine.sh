#!/usr/bin/env bash
# --transformer-impl transformer_engine on one GPU, with the real package on PYTHONPATH or installed.
# Results go to $OUT (default bench-out).
# usage: OUT=dir COMMIT=rev benchmarks/gpu_transformer_engine.sh [check] [tests] [losses] [resume] [steps]
#   check   the package imports; its version and PyTorch's -> te-check.txt                (15 s)
#   tests   its modules against plain ones, in bf16 and fp8 -> te-tests.txt               (40 s)
#   losses  200 steps of a small model, local, fused and by its modules -> te-losses-*    (60 s)
#   resume  20 steps in fp8, and their second half again from the checkpoint -> te-resume.txt   (40 s)
#   steps   the 8-layer 8B shape in bf16 and fp8, the 1B in fp8 -> te-step-*.json         (80 s)
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
COMMIT="${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
[ $# -eq 0 ] && set -- check tests losses resume steps
# The package takes a cuDNN of the system or the CUDA toolkit before PyTorch's; both must use one.
CUDNN_HOME="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("nvidia.cudnn").submodule_search_locations[0])')"
export CUDNN_HOME LD_LIBRARY_PATH="$CUDNN_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

check() {
  timeout 60 "$PYTHON" - > "$OUT/te-check.txt" 2>&1 <<'PY'
import torch, transformer_engine, transformer_engine.pytorch as te
print("torch", torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_name())
print("transformer_engine", transformer_engine.__version__, "fp8", te.is_fp8_available(return_reason=True))
PY
  echo "check: rc $?"; tail -3 "$OUT/te-check.txt" | cut -c1-200
}

tests() {
  timeout 120 "$PYTHON" -m pytest tests/model/test_transformer_engine.py -o addopts="" --import-mode=importlib \
    -q -rs -p no:cacheprovider > "$OUT/te-tests.txt" 2>&1
  echo "tests: rc $?"; grep -E "^(E  |FAILED|ERROR)" "$OUT/te-tests.txt" | cut -c1-200 | head -24; tail -2 "$OUT/te-tests.txt"
}

small="--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 4 --global-batch-size 8
  --eval-iters 0 --bf16 --lr 1e-3 --seed 1 --no-profile-ledger --mock-data --vocab-size 4096"

losses() {
  local name flags
  while read -r name flags; do
    timeout 60 "$PYTHON" -m redline train $small --train-iters 200 --save "$OUT/te-run-$name" $flags \
      > "$OUT/te-losses-$name.txt" 2>&1 < /dev/null
    echo "losses $name: rc $?"
    cp "$OUT/te-run-$name/metrics.jsonl" "$OUT/te-losses-$name.jsonl" 2>/dev/null
    tail -1 "$OUT/te-losses-$name.jsonl" | cut -c1-160; rm -rf "$OUT/te-run-$name"
  done <<'RUNS'
local --transformer-impl local
fused --transformer-impl fused
engine --transformer-impl transformer_engine
engine-fp8 --transformer-impl transformer_engine --fp8
fused-fp8 --transformer-impl fused --fp8
RUNS
}

resume() {
  local flags="$small --train-iters 20 --transformer-impl transformer_engine --fp8 --deterministic-mode --save-interval 10"
  timeout 60 "$PYTHON" -m redline train $flags --save "$OUT/te-run-a" > "$OUT/te-resume.txt" 2>&1
  timeout 60 "$PYTHON" -m redline train $flags --load "$OUT/te-run-a" --ckpt-step 10 --save "$OUT/te-run-b" >> "$OUT/te-resume.txt" 2>&1
  "$PYTHON" - "$OUT" >> "$OUT/te-resume.txt" 2>&1 <<'PY'
import json, sys
a, b = ({r["step"]: (r["loss"], r["grad_norm"]) for r in map(json.loads, open(f"{sys.argv[1]}/te-run-{x}/metrics.jsonl")) if r["kind"] == "step"} for x in "ab")
print("resumed steps", sorted(b), "equal to the bit:", {s: a[s] == b[s] for s in b}, "last", a[20], b.get(20))
PY
  echo "resume: rc $?"; tail -2 "$OUT/te-resume.txt" | cut -c1-400; rm -rf "$OUT"/te-run-*
}

step() { # name, then flags
  local name=$1; shift
  timeout 100 "$PYTHON" -m redline bench step "$@" --seq-length 8192 --mock-data --train-iters 20 --eval-iters 0 --bf16 \
    --transformer-impl transformer_engine --attention-backend fused --steps 6 --commit "$COMMIT" --out "$OUT/te-step-$name.json" \
    > "$OUT/te-step-$name.txt" 2>&1
  echo "$name: rc $?"; tail -12 "$OUT/te-step-$name.txt" | grep -E "tok|MFU|rror" | head -4
}

steps() {
  local large="--preset llama3-8b --num-layers 8 --micro-batch-size 1 --global-batch-size 4"
  step 8b-bf16 $large
  step 8b-fp8 $large --fp8
  step 1b-fp8 --preset llama3.2-1b --micro-batch-size 2 --global-batch-size 2 --fp8
}

for stage in "$@"; do "$stage"; done
(cd "$OUT" && tar czf te.tar.gz --exclude=te.tar.gz te-* && rm -f te-*.txt te-*.jsonl)
