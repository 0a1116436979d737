#!/usr/bin/env bash
# What fp8 costs in loss: a model of 111M parameters on real text, bf16 with two seeds and fp8, same data order.
# The text is the Python sources and documentation of the packages on this machine; one file in fifty, by the
# hash of its path, is held out. usage: OUT=dir COMMIT=rev benchmarks/fp8_convergence.sh [STEPS, default 1500]
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}"
PYTHON="${PYTHON:-python3}" STEPS="${1:-1500}" WORK="$(mktemp -d)"
mkdir -p "$OUT"

"$PYTHON" - "$WORK" <<'PY'
import hashlib, json, pathlib, sys, sysconfig
work, seen, sizes = pathlib.Path(sys.argv[1]), set(), {"train": 0, "valid": 0}
roots = {pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
files = {name: open(work / f"{name}.jsonl", "w") for name in sizes}
for path in sorted(path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".pyi", ".md", ".rst", ".txt")):
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        continue
    mark = hashlib.sha256(text.encode()).digest()
    if len(text) < 200 or mark in seen or sizes["train"] > 160_000_000:
        continue
    seen.add(mark)
    name = "valid" if hashlib.sha256(str(path).encode()).digest()[0] % 50 == 0 else "train"
    sizes[name] += len(text)
    files[name].write(json.dumps({"text": text}) + "\n")
print("characters:", sizes)
PY
"$PYTHON" -m redline data prepare "$WORK/valid.jsonl" --train-tokenizer 16384 --output-prefix "$WORK/valid" > /dev/null || exit 1
"$PYTHON" -m redline data prepare "$WORK/train.jsonl" --tokenizer-model "$WORK/valid_tokenizer.json" --output-prefix "$WORK/train" \
  > "$OUT/convergence-data.txt" || exit 1

run() { # name, then flags
  local name=$1; shift
  "$PYTHON" -m redline train --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --swiglu \
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
    --untie-embeddings-and-output-weights --tokenizer-model "$WORK/valid_tokenizer.json" --seq-length 1024 \
    --train-data-path "$WORK/train_text_document" --valid-data-path "$WORK/valid_text_document" \
    --micro-batch-size 16 --global-batch-size 16 --train-iters "$STEPS" --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine \
    --lr-warmup-iters 100 --clip-grad 1.0 --weight-decay 0.1 --eval-interval 250 --eval-iters 20 --save-interval 100000 \
    --no-save-optim --bf16 --save "$WORK/$name" "$@" > "$OUT/convergence-$name.txt" 2>&1
  echo "$name: rc $?"
}
run bf16; run bf16-seed2 --seed 4321; run fp8 --fp8
"$PYTHON" - "$WORK" "$OUT" "${COMMIT:-unknown}" <<'PY'
import json, pathlib, sys, time, torch
work, out, commit = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
found = {"case": "fp8-convergence", "commit": commit, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
         "card": torch.cuda.get_device_name(), "data": (out / "convergence-data.txt").read_text(), "runs": {}}
for name in ("bf16", "bf16-seed2", "fp8"):
    rows = [json.loads(line) for line in open(work / name / "metrics.jsonl")]
    steps = [row for row in rows if row["kind"] == "step"]
    found["runs"][name] = {
        "valid": [(row["step"], row["loss"]) for row in rows if row["kind"] == "valid" and row["split"] == "valid"],
        "train": [(row["step"], row["loss"]) for row in steps[::25]],
        "tokens_per_s": sorted(row["tokens_per_s"] for row in steps)[len(steps) // 2]}
    print(name, found["runs"][name]["valid"][-1], round(found["runs"][name]["tokens_per_s"]))
json.dump(found, open(out / "fp8-convergence.json", "w"), indent=1)
PY
rm -rf "$WORK"
