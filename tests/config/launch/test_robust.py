"""Any input ends, soon, in a Launch or in a clear error."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.config.launch import Launch, read_launch
from redline.errors import ConfigError, DataError

SCRIPTS = Path(__file__).parent / "scripts"
COMMAND = (
    "\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4\n"
)
LONGEST_S = 5.0  # of processor time, for any input; most take a hundredth of it


def attempt(path: Path) -> Launch | None:
    """The launch, or None when it was refused with a reason and a mend; fails when it takes long."""
    begun = time.process_time()
    try:
        launch = read_launch(path)
        assert len(launch.flags) <= 2_000
        assert all(use.line >= 1 for use in launch.flags)
    except (DataError, ConfigError) as error:
        assert error.what and error.why and error.mend
        launch = None
    assert time.process_time() - begun < LONGEST_S
    return launch


ENDLESS = {
    "nested (": "(" * 200_000,
    "nested {": "{ " * 100_000,
    "nested $((": "$((" * 80_000,
    "nested $(": "$(" * 100_000,
    "nested ${": "${" * 50_000,
    "nested defaults": "${A:-" * 20_000 + "x" + "}" * 20_000,
    "nested quotes": '"$(' * 60_000,
    "open heredocs": "cat <<A\n" * 20_000,
    "open quote": "A='" + "x\n" * 50_000,
    "open text": 'A="' + "$x " * 50_000,
    "dollars": "$" * 100_000,
    "continuations": "\\\n" * 100_000,
    "nested ifs": "if [ $A = 1 ]; then\n" * 3_000 + "X=1\n" + "fi\n" * 3_000,
    "nested tests": "[[ " + "( " * 2_000 + "1" + " )" * 2_000 + " ]]",
    "many ands": "[ $A ] && " * 3_000 + "X=1",
    "many nots": "! " * 3_000 + "true",
    "many pipes": "a|" * 5_000 + "b",
    "many arms": "case $A in\n" + "".join(f"{i}) X={i}; A{i}=1;;\n" for i in range(2_000)) + "esac",
    "many elifs": "if [ $A = x ]; then X=1\n"
    + "".join(f'elif [ $A = {i} ]; then Y="$Y {i}"\n' for i in range(2_000))
    + "fi",
    "doubling text": "A=x\n" + "A=$A$A\n" * 60,
    "doubling array": "A=(1 2 3)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
    "doubling by replacement": "A=aaaaaaaa\n" + "A=${A//a/aaaaaaaa}\n" * 40,
    "doubling branches": "".join(
        f'if [ $V{i} = a ]; then A="$A {i}"; else A="{i} $A"; fi\n' for i in range(300)
    ),
    "recursion": "f() { f; f; f; }; f",
    "mutual recursion": "f() { g; g; }; g() { f; f; }; f",
    "fork bomb": ":(){ :|:& };:",
    "endless while": "while true; do while :; do X=$X$X; done; done",
    "endless for": "for ((;;)); do for ((;;)); do for ((;;)); do X=1; done; done; done",
    "long ranges": "for i in {1..999999999}; do for j in {1..999999999}; do A+=($i); done; done",
    "sources itself": 'source "$0"; . ./script.sh; bash $0; sbatch "$0"',
    "evaluates itself": 'A=\'eval "$A$A"\'; eval "$A"',
    "runs its heredoc": "cat > x.sh <<E\nbash x.sh\nE\nbash x.sh",
    "sources devices": "source /dev/zero; . /dev/stdin; source /proc/self/mem; . ~/.ssh/id_rsa",
    "hard patterns": "A="
    + "a" * 3_000
    + "\ncase $A in "
    + "*a" * 90
    + "b) X=1;; esac\nB=${A%%"
    + "*a" * 50
    + "b}",
    "huge numbers": "A=$((9**9**9**9)); B=$((1<<9999999)); C=$((1/0)); D=$((08)); E=$(("
    + "(" * 5_000
    + "1))",
    "private characters": 'A=\U000f0000\U000f0001; eval "$A $Q \U000f0000"',
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_hostile_scripts_end(text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(text)
    attempt(script)
    script.write_text(COMMAND + text)
    launch = attempt(script)
    assert launch is None or launch.world_size in (8, None)


def test_the_command_before_an_endless_loop_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(COMMAND + ENDLESS["endless for"])
    launch = attempt(script)
    assert launch is not None and launch.world_size == 8
    assert any(assumption.name == "the rest of the script" for assumption in launch.assumptions)


REFUSED = {
    "binary": (b"\x7fELF\0\0\1", "not a text file"),
    "5 MB": (b"echo\n" * 1_000_000, "5,000,000 bytes"),
    "empty": (b"", "no training command"),
    "prose": (b"This is a letter.\nIt starts nothing (yes) & so on.\n", "no training command"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_script_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_launch(script)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.sh"):
        read_launch(tmp_path / "no.sh")
    with pytest.raises(DataError, match="no run's folder"):
        read_launch(tmp_path)


def test_nothing_is_executed(tmp_path: Path) -> None:
    """Commands, substitutions, evals and heredocs leave no trace."""
    trace = tmp_path / "trace"
    script = tmp_path / "script.sh"
    touches = f"touch {trace}; A=$(touch {trace}); B=`touch {trace}`; eval 'touch {trace}'; echo > {trace}\n"
    script.write_text(
        touches + f"bash <<E\ntouch {trace}\nE\n: ${{X:=$(touch {trace})}}; [ $(touch {trace}) ]" + COMMAND
    )
    assert attempt(script) is not None
    assert not trace.exists()


def test_scripts_elsewhere_are_not_read(tmp_path: Path) -> None:
    """A sourced file counts only in the script's folder or below it."""
    (tmp_path / "outside.sh").write_text("TP=2")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "beside.sh").write_text("PP=2")
    (inner / "link.sh").symlink_to(tmp_path / "outside.sh")
    script = inner / "script.sh"
    flags = "--tensor-model-parallel-size ${TP:-1} --pipeline-model-parallel-size ${PP:-1}"
    script.write_text(f"source ../outside.sh; source ./link.sh; . beside.sh\n{COMMAND.strip()} {flags}\n")
    launch = attempt(script)
    assert launch is not None
    assert launch.config.parallel.tensor_model_parallel_size == 1
    assert launch.config.parallel.pipeline_model_parallel_size == 2
    assert {"../outside.sh", "./link.sh"} <= {assumption.name for assumption in launch.assumptions}


PIECES = """
$ { } ( ) " ' \\ ; | & < > [ ] = + - -- # / % : , * ? ! ` ~ @ A b 1 if then fi for in do done case esac while
eval source export local f() A=( ${A[@]} ${B:- $(( <<EOF EOF torchrun pretrain_gpt.py --lr --num-layers
bash -c sbatch [[ ]]
"""
ALPHABET = st.sampled_from([*PIECES.split(), " ", "\n", "\t", "\r", "\u00e9", "EOF\n", "<<EOF\n"])
QUICK = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@QUICK
@given(st.lists(st.one_of(ALPHABET, st.just(" ")), max_size=80))
def test_any_text_ends(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    script = tmp_path_factory.getbasetemp() / "fuzz.sh"
    script.write_text("".join(parts), newline="")
    attempt(script)


@QUICK
@given(st.integers(0, 2**32 - 1))
def test_damaged_scripts_end(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    script = tmp_path_factory.getbasetemp() / "damaged.sh"
    script.write_text(damaged(random.Random(seed)))
    attempt(script)


def damaged(source: random.Random) -> str:
    """One of the scripts with pieces cut out, doubled, moved, or replaced by another's."""
    texts = sorted(path for path in SCRIPTS.rglob("*") if path.is_file())
    text = source.choice(texts).read_text()
    other = source.choice(texts).read_text()
    for _ in range(source.randint(1, 8)):
        start = source.randrange(len(text) + 1)
        end = min(start + source.choice([1, 1, 2, 5, 40, 400]), len(text))
        at = source.randrange(len(other) + 1)
        piece = source.choice(
            ["", text[start:end] * 2, other[at : at + 60], source.choice("$(){}[]\"'`\\\n<>|&;#")]
        )
        text = text[:start] + piece + text[end:]
    return text


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_of_damage(tmp_path: Path) -> None:
    until = time.monotonic() + 600
    source = random.Random(20_261_129)
    script = tmp_path / "script.sh"
    rounds = 0
    while time.monotonic() < until:
        script.write_text(damaged(source))
        attempt(script)
        rounds += 1
    assert rounds > 1_000


def test_five_hundred_lines_are_quick(tmp_path: Path) -> None:
    """A script of 500 lines with everything in it, in well under a second with the interpreter's start."""
    lines = [f"export NAME_{n}=${{NAME_{n - 1}:-{n}}}" for n in range(1, 200)]
    lines += [
        f'if [ "$NAME_{n}" = "{n}" ]; then ARGS+=(--save-interval {n}); else X{n}=$((X{n - 1} + 1)); fi'
        for n in range(1, 200)
    ]
    lines += ["ARGS+=( \\", *["    --log-interval 1 \\"] * 90, ")"]
    script = tmp_path / "script.sh"
    script.write_text(
        "\n".join([*lines, 'torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --num-layers 2', ""])
    )
    assert len(script.read_text().splitlines()) >= 490
    program = f"from redline.config.launch import read_launch; read_launch({str(script)!r})"
    fastest = min(_timed(program) for _ in range(3))
    assert fastest < 1.0, f"{fastest:.2f} s"


def _timed(program: str) -> float:
    """Processor seconds of the whole process: what other processes do at the time does not count."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime


def test_the_parser_is_imported_only_for_scripts() -> None:
    program = (
        "import sys, redline.config, redline.config.launch; "
        "assert not {'tree_sitter', 'tree_sitter_bash', 'yaml', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
