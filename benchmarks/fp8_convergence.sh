#!/usr/bin/env bash
# What fp8 costs in loss: a model of 111M parameters on real text (text_corpus.py), bf16 with two seeds and fp8.
# bf16 and fp8 see the same batches and begin from the same weights; all three are judged on the same held-out text, all of it.
# With three cards all run side by side; with two bf16 and fp8 do, then the second seed on both, data parallel.
# usage: OUT=dir COMMIT=rev [GPUS=1|2|3] [CORPUS=folder, kept] benchmarks/fp8_convergence.sh [STEPS, default 1500] [text]
#   text   only prepare CORPUS, which needs no GPU and may run beside other work          (about 1 minute of 16 cores)
# SEED2=no leaves the second seed out where there are two cards.
# Leaves fp8-convergence.json in OUT. 1,500 steps: 98M tokens a run; about 5 minutes with two H200s.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" GPUS="${GPUS:-2}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
PYTHON="${PYTHON:-python3}" STEPS="${1:-1500}" WORK="$(mktemp -d)" CORPUS="${CORPUS:-$OUT/../corpus}"
mkdir -p "$OUT"
exec 9> "$CORPUS.lock" && flock 9 # whoever comes second waits for the text
timeout 240 "$PYTHON" benchmarks/text_corpus.py "$CORPUS" > "$OUT/convergence-data.txt" || exit 1
exec 9>&-
[ "${2:-}" = text ] && exit 0
read -ra DATA <<< "$("$PYTHON" -c "import json, sys; print(json.load(open(sys.argv[1] + '/corpus.json'))['flags'])" "$CORPUS")"

run() { # name, cards, micro-batch size, then flags
  local name=$1 cards=$2 size=$3; shift 3
  local start=("$PYTHON" -m)
  [[ $cards == *,* ]] && start=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" -m)
  CUDA_VISIBLE_DEVICES=$cards timeout 330 "${start[@]}" redline train --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 \
    --num-attention-heads 12 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --seq-length 1024 "${DATA[@]}" \
    --micro-batch-size "$size" --global-batch-size 64 --train-iters "$STEPS" --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine \
    --lr-warmup-iters 200 --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1 --eval-interval 250 --save-interval 100000 \
    --no-save-optim --bf16 --save "$WORK/$name" "$@" > "$OUT/convergence-$name.txt" 2>&1
  echo "$name: rc $? after ${SECONDS}s"; collect
}

collect() { # what is there so far
  "$PYTHON" - "$WORK" "$OUT" "${COMMIT:-unknown}" "$CORPUS" "$STEPS" <<'PY'
import json, pathlib, sys, time, torch
work, out, commit, corpus, steps = *map(pathlib.Path, sys.argv[1:3]), sys.argv[3], pathlib.Path(sys.argv[4]), int(sys.argv[5])
data = json.loads((corpus / "corpus.json").read_text())
del data["flags"]  # paths of that machine
found = {"case": "fp8-convergence", "commit": commit, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
         "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "data": data, "steps": steps, "runs": {}}
for name in ("bf16", "fp8", "bf16-seed2"):
    if not (work / name / "metrics.jsonl").exists():
        continue
    rows = [json.loads(line) for line in open(work / name / "metrics.jsonl")]
    taken = [row for row in rows if row["kind"] == "step"]
    windows = [taken[at : at + 25] for at in range(0, len(taken), 25)]
    mean = lambda window, key: sum(row[key] for row in window) / len(window)
    found["runs"][name] = {
        "valid": [(row["step"], row["loss"]) for row in rows if row["kind"] == "valid" and row["split"] == "valid"],
        "train": [(window[-1]["step"], mean(window, "loss")) for window in windows],
        "grad_norm": [(window[-1]["step"], max(row["grad_norm"] or 0.0 for row in window)) for window in windows],
        "tokens_per_s": sorted(row["tokens_per_s"] for row in taken)[len(taken) // 2] if taken else None}
runs, base = found["runs"], found["runs"].get("bf16", {"valid": []})["valid"]
for name, run in runs.items():
    for (step, loss), (_, other) in zip(run["valid"], base):
        print(f"{name} step {step}: {loss:.4f} ({(loss / other - 1) * 100:+.2f}% of bf16)")
    print(name, run["tokens_per_s"], "tokens/s")
json.dump(found, open(out / "fp8-convergence.json", "w"), indent=1)
PY
}

if [ "$GPUS" -ge 3 ]; then
  run bf16 0 64 > /dev/null & run bf16-seed2 2 64 --seed 4321 > /dev/null & run fp8 1 64 --fp8 > /dev/null
  wait && collect
elif [ "$GPUS" -ge 2 ]; then
  run bf16 0 64 > /dev/null & first=$!
  run fp8 1 64 --fp8 & second=$!
  wait $first $second
  [ "${SEED2:-yes}" = no ] || run bf16-seed2 0,1 32 --seed 4321
else
  run bf16 "${CUDA_VISIBLE_DEVICES:-0}" 64; run fp8 "${CUDA_VISIBLE_DEVICES:-0}" 64 --fp8
  run bf16-seed2 "${CUDA_VISIBLE_DEVICES:-0}" 64 --seed 4321
fi
rm -rf "$WORK"
