#!/usr/bin/env bash
# The fused operators on one GPU. Results go to $OUT (default bench-out) as JSON, with the logs beside them.
# usage: OUT=dir [COMMIT=rev] benchmarks/gpu_kernels.sh [tests] [kernels] [full] [tune] [steps | eight | one]
#   tests    the kernels' tests on this card -> gpu-tests.json               (2 minutes)
#   kernels  every operator against its twin, torch.compile and the libraries that are installed -> kernels.json
#            (one case an operator, two of rotary and of head and loss; 3 minutes)
#   full     the same at every size -> kernels-full.json                     (8 minutes)
#   tune     device time kernel by kernel, and other launch choices in turns -> tune.json  (5 minutes; of the
#            operators in OPERATORS, where it is set, every size)
#   steps    whole steps with plain operators, fused ones, the residual in the norm -> step-*.json  (3 minutes);
#            eight, one: of the 8-layer 8B shape alone, of the 1B model alone
# With no stage named: tests and kernels. What a stage has measured is written as it comes.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-bench-out}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
REVISION=(${COMMIT:+--commit "$COMMIT"})
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
  timeout 400 "$PYTHON" -m redline bench kernels --quick --out "$OUT/kernels.json" "${REVISION[@]}"
  echo "kernels: rc $?"
}

full() {
  timeout 560 "$PYTHON" -m redline bench kernels --out "$OUT/kernels-full.json" "${REVISION[@]}"
  echo "full: rc $?"
}

tune() {
  timeout 400 "$PYTHON" benchmarks/tune_kernels.py "$OUT/tune.json" ${OPERATORS:-}
  echo "tune: rc $?"
}

operators() {
  timeout 150 "$PYTHON" -m redline bench step --operators "$@" --seq-length 8192 --mock-data --bf16 \
    --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --attention-backend fused --steps 6 \
    "${REVISION[@]}" | grep -E "tokens/s|Error|why|mend"
  echo "steps: rc ${PIPESTATUS[0]}"
}

eight() { operators --preset llama3-8b --num-layers 8 --out "$OUT/step-operators-llama3-8b.json"; }

one() { operators --preset llama3.2-1b --out "$OUT/step-operators-llama3.2-1b.json"; }

steps() { eight; one; }

for stage in "$@"; do "$stage"; done
