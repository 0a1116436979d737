#!/usr/bin/env bash
# The fused operators on one GPU. Results go to $OUT (default bench-out) as JSON, with the logs beside them.
# usage: OUT=dir benchmarks/gpu_kernels.sh [tests] [kernels] [full] [tune] [steps]
#   tests    the kernels' tests on this card -> gpu-tests.json               (3 minutes)
#   kernels  every operator against its twin, torch.compile and the libraries that are installed -> kernels.json
#            (one case an operator, two of head and loss; 4 minutes)
#   full     the same at every size -> kernels-full.json                     (9 minutes)
#   tune     device time kernel by kernel, and other launch choices -> tune.json  (3 minutes)
#   steps    whole training steps, local and fused -> step-*.json            (8 minutes)
# With no stage named: tests and kernels, within 8 minutes.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
[ $# -eq 0 ] && set -- tests kernels

tests() {
  timeout 180 "$PYTHON" -m pytest tests/kernels tests/bench tests/model/test_fused.py -n 10 -o addopts="" \
    --import-mode=importlib -q -rs --junitxml="$OUT/tests.xml" > "$OUT/tests.txt" 2>&1
  echo "tests: rc $?"; tail -15 "$OUT/tests.txt"
  "$PYTHON" - "$OUT" <<'PY'
import json, sys, torch, triton, xml.etree.ElementTree as tree
suite = tree.parse(f"{sys.argv[1]}/tests.xml").getroot().find("testsuite")
bad = [case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
found = {"case": "gpu-tests", "date": suite.get("timestamp"), "card": torch.cuda.get_device_name(),
         "torch": torch.__version__, "triton": triton.__version__, **counts,
         "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad]}
json.dump(found, open(f"{sys.argv[1]}/gpu-tests.json", "w"), indent=2)
print(json.dumps(found))
PY
}

kernels() {
  timeout 290 "$PYTHON" -m redline bench kernels --quick --out "$OUT/kernels.json"
  echo "kernels: rc $?"
}

full() {
  timeout 560 "$PYTHON" -m redline bench kernels --out "$OUT/kernels-full.json"
  echo "full: rc $?"
}

tune() {
  timeout 300 "$PYTHON" benchmarks/tune_kernels.py "$OUT/tune.json"
  echo "tune: rc $?"
}

steps() {
  for impl in local fused; do
    for model in "llama3-8b --num-layers 8" "llama3.2-1b"; do
      timeout 150 "$PYTHON" -m redline bench step --preset $model --transformer-impl $impl --seq-length 8192 --mock-data \
        --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --bf16 --attention-backend fused \
        --steps 8 --out "$OUT/step-${model%% *}-$impl.json"
      echo "$model $impl: rc $?"
    done
  done
}

for stage in "$@"; do "$stage"; done
