"""`redline doctor`: verdict, exit code, JSON, SARIF, patch, languages; quick and without torch."""

import io
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.cli.doctor import main
from redline.config.launch import read_launch
from redline.doctor import Case, diagnose
from redline.errors import RedlineError, UsageError
from redline.hardware import hardware_named
from redline.ledger import METRICS_FILE
from redline.report.doctor_text import print_report

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
export NCCL_IB_DISABLE=1
TP=${TP:-2}
ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128256
  --micro-batch-size 1 --global-batch-size 128 --train-iters 100
  --tensor-model-parallel-size $TP --fp16 --swiglu --normalization RMSNorm
  --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --lr 1e-4 --use-flash-atn
)
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py "${ARGS[@]}"
"""
FIELDS = {"id", "account", "severity", "title", "evidence", "file", "line", "why", "mend", "gain"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    return path


def document(capsys: Any, *argv: str) -> dict[str, Any]:
    main([*argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json(capsys: Any, script: Path) -> None:
    found = document(capsys, str(script), "--gpu", "h100")
    assert set(found) == {"verdict", "findings", "unknown_flags", "assumptions", "facts"}
    assert all(
        set(each) == FIELDS and set(each["gain"]) == {"step_time", "basis", "memory_bytes"}
        for each in found["findings"]
    )
    assert {"RL003", "RL004", "RL005", "RL006", "RL007", "RL008", "RL009", "RL601"} <= {
        each["id"] for each in found["findings"]
    }
    assert found["unknown_flags"][0]["flag"] == "--use-flash-atn" and found["unknown_flags"][0]["line"] == 13
    assert found["facts"]["world_size"] == 16 and found["facts"]["dp"] == 8
    verdict = found["verdict"]
    assert 0 < verdict["predicted_mfu_now"] < verdict["predicted_mfu_after"] < 1
    assert verdict["fits"] and verdict["memory_of_card"] == 80 << 30 and verdict["worst"] == "error"


def test_exit_codes(capsys: Any, script: Path, tmp_path: Path) -> None:
    assert main([str(script), "--gpu", "h100"]) == 1
    fine = tmp_path / "fine.sh"
    fine.write_text(SCRIPT.replace(" --use-flash-atn", "").replace("export NCCL_IB_DISABLE=1\n", ""))
    assert main([str(fine), "--gpu", "h100"]) == 0
    with pytest.raises(RedlineError, match="there is no"):
        main([str(tmp_path / "missing.sh")])
    (tmp_path / "hello.sh").write_text("echo hello\n")
    with pytest.raises(RedlineError, match="no training command") as refused:
        main([str(tmp_path / "hello.sh")])
    assert refused.value.exit_code == 2
    with pytest.raises(RedlineError, match="data sheet"):
        main([str(script), "--gpu", "h9000"])
    with pytest.raises(RedlineError, match=r"a\.sh is one word too many"):
        main([str(script), "a.sh"])
    with pytest.raises(RedlineError, match="no option --frobnicate") as refused:
        main(["--frobnicate"])
    assert refused.value.exit_code == 2


def test_report_begins_with_the_verdict(capsys: Any, script: Path) -> None:
    main([str(script), "--gpu", "h100"])
    text = capsys.readouterr().out
    assert (
        text.index("Verdict")
        < text.index("memory of the fullest GPU")
        < text.index("Findings, by expected gain")
    )
    assert "--use-flash-attn?" in text and "pretrain.sh:3" in text


def test_chinese(capsys: Any, script: Path) -> None:
    main([str(script), "--gpu", "h100", "--lang", "zh"])
    assert "\u7ed3\u8bba" in capsys.readouterr().out


def test_set_and_gpus(capsys: Any, script: Path) -> None:
    found = document(capsys, str(script), "--gpu", "h100", "--set", "TP=4", "--gpus", "32")
    assert found["facts"]["tp"] == 4 and found["facts"]["world_size"] == 32


def test_assumed_gpu_is_said(capsys: Any, script: Path) -> None:
    found = document(capsys, str(script))
    assert "gpu" in {each["name"] for each in found["assumptions"]}


def test_sarif(capsys: Any, script: Path, tmp_path: Path) -> None:
    main([str(script), "--gpu", "h100", "--sarif", str(tmp_path / "out.sarif")])
    log = json.loads((tmp_path / "out.sarif").read_text())
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] and result["level"] in (
            "error",
            "warning",
            "note",
        )
        region = result["locations"][0]["physicalLocation"].get("region")
        assert region is None or region["startLine"] >= 1


def test_fix(capsys: Any, script: Path, tmp_path: Path) -> None:
    out = tmp_path / "better.sh"
    before = document(capsys, str(script), "--gpu", "h100")
    main([str(script), "--gpu", "h100", "--fix", str(out)])
    text = capsys.readouterr().out
    assert "+export NCCL_IB_DISABLE=0" in text and f"patched: {out}" in text
    assert script.read_text() == SCRIPT and out.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(out)], check=False).returncode == 0
    after = document(capsys, str(out), "--gpu", "h100")
    assert after["verdict"]["predicted_mfu_now"] == pytest.approx(
        before["verdict"]["predicted_mfu_after"], rel=0.02
    )
    still = {each["id"] for each in after["findings"]}
    assert not still & {"RL003", "RL004", "RL005", "RL006", "RL007", "RL008", "RL009"}


def test_machine_files(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "topo").write_text("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n")
    (tmp_path / "log").write_text("NCCL INFO Using network Socket\n")
    found = document(capsys, "--topo", str(tmp_path / "topo"), "--nccl-log", str(tmp_path / "log"))
    assert {"RL506", "RL009"} <= {each["id"] for each in found["findings"]} and found["facts"] == {}


@pytest.mark.parametrize(
    ("option", "text", "why"),
    (("--nvidia-smi", "hello\n", "names no GPU"), ("--topo", "NIC0\tNIC1\n", "no column of GPU0")),
)
def test_files_that_no_tool_wrote(tmp_path: Path, option: str, text: str, why: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=why):
        main([option, str(tmp_path / "file")])


def test_a_log_without_nccl(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("iteration 1\n")
    assert main(["--nccl-log", str(tmp_path / "log")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "has no line of it" in text and "network ?" not in text


def test_a_script_that_leaves(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "case ${1:-1B} in\n 1B) ;;\n *) exit 1 ;;\nesac\npython pretrain_gpt.py --num-layers 2\n"
    )
    assert main([str(script), "--json"]) in (0, 1)
    with pytest.raises(UsageError, match=r"exit at run\.sh:3 before it starts any"):
        main([str(script), "--set", "1=9B"])


def test_mfu_of_two_formats(capsys: Any, tmp_path: Path) -> None:
    """In fp32 an MFU is a share of another peak: the verdict never sets the two side by side unsaid."""
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 "
        "--global-batch-size 512\n"
    )
    assert document(capsys, str(script), "--gpu", "h100")["verdict"]["mfu_over"] == "dense fp32 peak"
    main([str(script), "--gpu", "h100"])
    text = " ".join(capsys.readouterr().out.split())
    assert "% of the fp32 peak now, " in text and "% of the 16-bit peak after" in text
    script.write_text(script.read_text().replace("--num-layers", "--bf16 --num-layers"))
    assert document(capsys, str(script), "--gpu", "h100")["verdict"]["mfu_over"] == "dense 16-bit peak"
    main([str(script), "--gpu", "h100"])
    assert " peak now" not in capsys.readouterr().out


def test_evidence_begins_with_what_the_script_says(capsys: Any, tmp_path: Path) -> None:
    """A second round of mends lowers tp again: the first evidence is still the script's."""
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 "
        "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 512 --tensor-model-parallel-size 8\n"
    )
    found = document(capsys, str(script), "--gpu", "h100")["findings"]
    (smaller,) = (each for each in found if each["id"] == "RL205")
    assert smaller["evidence"] == "tp 8, and tp 2 fits; tp 2, and tp 1 fits"


def test_this_machine(capsys: Any) -> None:
    assert main([]) in (0, 1)
    text = capsys.readouterr().out
    assert "NUMA nodes" in text and "torch" in text


def test_list_checks(capsys: Any) -> None:
    assert main(["--list-checks"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 37


def test_run_folder(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        "[model]\nnum_layers = 16\nhidden_size = 2048\nnum_attention_heads = 16\nvocab_size = 32000\n"
        "[train]\nseq_length = 2048\nmicro_batch_size = 4\nglobal_batch_size = 4\ntrain_iters = 50\n"
        "[precision]\nbf16 = true\n"
    )
    steps = [
        {
            "kind": "step",
            "step": number,
            "step_time_s": 1.5 if number % 10 == 0 else 1.0,
            "tokens_per_s": 8192,
            "mfu": 0.06,
        }
        for number in range(1, 51)
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(each) + "\n" for each in steps))
    (tmp_path / "summary.json").write_text(
        json.dumps({"hardware": {"name": "NVIDIA H200"}, "outcome": "finished"})
    )
    found = document(capsys, str(tmp_path))
    by_id = {each["id"]: each for each in found["findings"]}
    assert {"RL701", "RL702", "RL704"} <= by_id.keys()
    assert found["verdict"]["gpu"] == "H200 SXM" and found["verdict"]["measured_mfu"] == pytest.approx(0.06)
    assert "every 10" in by_id["RL702"]["evidence"] and by_id["RL701"]["gain"]["step_time"] > 0.5


OWN_VOCAB = "num_layers = 4\nhidden_size = 512\nnum_attention_heads = 8\n[train]\nseq_length = 512\n"


def run_folder(folder: Path, options: str, summary: dict[str, Any]) -> Path:
    steps = [{"kind": "step", "step": number, "step_time_s": 1.0, "mfu": 0.06} for number in range(1, 9)]
    (folder / METRICS_FILE).write_text("".join(json.dumps(each) + "\n" for each in steps))
    (folder / "config.toml").write_text(options)
    (folder / "summary.json").write_text(json.dumps({"hardware": {"name": "NVIDIA H200"}, **summary}))
    return folder


@pytest.mark.parametrize("preset", ["", 'preset = "demo"\n'])
def test_a_run_is_predicted_as_it_was(capsys: Any, tmp_path: Path, preset: str) -> None:
    """Its vocabulary as it recorded it, and all its ranks; what is not recorded is assumed, and said."""
    options = f'data_path = "mine_text_document"\n[model]\n{preset}{OWN_VOCAB}'
    folder = run_folder(tmp_path, options, {"world_size": 4})
    unknown = document(capsys, str(folder))
    assert [each["name"] for each in unknown["assumptions"]] == ["vocab_size"]
    assert unknown["facts"]["world_size"] == 4
    checkpoint = folder / "checkpoints" / "iter_0000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "values.json").write_text('{"model": {"vocab_size": 300}}')
    recorded = document(capsys, str(folder))
    assert recorded["assumptions"] == []
    run_folder(folder, f"vocab_size = 300\n{options}", {"world_size": 4})
    stated = document(capsys, str(folder))
    assert recorded["verdict"]["memory_bytes"] == stated["verdict"]["memory_bytes"]
    assert unknown["verdict"]["memory_bytes"] > recorded["verdict"]["memory_bytes"] + (1 << 29)


def test_a_broken_summary_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, f"[model]\n{OWN_VOCAB}", {})
    (folder / "summary.json").write_text("{\n")
    with pytest.raises(UsageError, match=r"summary\.json cannot be read: Expecting"):
        main([str(folder)])


@pytest.mark.parametrize("text", ["", "[train]\ntrain_iters = 3\n"])
def test_a_file_without_a_model_is_the_demo(capsys: Any, tmp_path: Path, text: str) -> None:
    """As `redline train` takes it, with the vocabulary of the demo's corpus."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main([str(path), "--gpu", "h100"]) == 0
    capsys.readouterr()
    found = document(capsys, str(path), "--gpu", "h100")
    assert found["facts"]["hidden_size"] == 192 and found["assumptions"] == []
    path.write_text("[model]\nnum_layers = 4\n")
    assert main([str(path), "--gpu", "h100"]) == 1


def test_quick_and_without_torch(tmp_path: Path) -> None:
    """A script of 500 lines in under a second, start included (the best of three on a busy machine)."""
    long = tmp_path / "long.sh"
    lines = [
        f"X{number}=$((X{number - 1} + 1)); export Y{number}=${{X{number}:-3}}" for number in range(1, 480)
    ]
    long.write_text("#!/bin/bash\nX0=1\n" + "\n".join(lines) + "\n" + SCRIPT)
    code = (
        "import sys; from redline.cli.doctor import main; main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    took = []
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, str(long)], capture_output=True, text=True, check=False
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(took) < 1.0  # processor seconds, start included


def test_lines_hang_on_a_terminal_and_stay_whole_in_a_file(script: Path) -> None:
    """Wrapped between words, at 60 columns, deeper than the line begins; flags are never cut."""
    diagnosis = diagnose(case_of_path(script))
    wrapped, whole = io.StringIO(), io.StringIO()
    print_report(
        Console(file=wrapped, width=60, force_terminal=True, no_color=True), diagnosis, [], "en", "x"
    )
    print_report(Console(file=whole, width=60), diagnosis, [], "en", "x")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", wrapped.getvalue()).splitlines()
    inside = [line for line in lines if line.startswith("      ")]
    assert inside and all(len(line) <= 60 or " " not in line.strip() for line in inside)
    begun = [number for number, line in enumerate(lines) if line.startswith("      why:")]
    assert any(lines[number + 1].startswith("        ") for number in begun)
    joined = re.sub(r"\s+", " ", " ".join(lines))
    assert re.sub(r"\s+", " ", whole.getvalue()).strip() == joined.strip()
    assert max(map(len, whole.getvalue().splitlines())) > 100
    narrow = io.StringIO()
    print_report(Console(file=narrow, width=20), diagnosis, [], "en", "x")
    assert narrow.getvalue() == whole.getvalue()


def case_of_path(path: Path) -> Case:
    launch = read_launch(path)
    hardware = hardware_named("h100")
    return Case(launch=launch, world_size=16, hardware=hardware, environment={"NCCL_IB_DISABLE": "1"})


BROKEN = {
    "half a string": 'ARGS="--num-layers 2\ntorchrun pretrain_gpt.py $ARGS\n',
    "nothing but a flag": "torchrun pretrain_gpt.py --\n",
    "numbers without end": "python pretrain_gpt.py --num-layers 9999999999999999999999 --hidden-size 1e9\n",
    "negative": "python pretrain_gpt.py --num-layers -4 --hidden-size 0 --num-attention-heads 0 --bf16\n",
    "all is twice": "python pretrain_gpt.py --bf16 --bf16 --fp16 --num-layers 2 --num-layers 3\n",
}


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_input_ends_in_a_report_or_a_reason(text: str, lang: str, tmp_path: Path, capsys: Any) -> None:
    path, out = tmp_path / "run.sh", tmp_path / "out.sh"
    path.write_text(text)
    try:
        assert main([str(path), "--gpu", "h100", "--lang", lang, "--fix", str(out)]) in (0, 1)
    except RedlineError as error:
        assert error.what and error.why and error.mend and error.exit_code == 2
