"""Characters beyond C's tables: the grammar's scanner must never be shown them, and offsets must hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from redline.config.launch import read_launch

WIDE = ("\u0101", "\u4e2d", "\ue000", "\uffff", "\U0001f600", "\U000f0001", "\U0010ffff")
PLACES = ("a b{%s c", "a b{1..%s c", "a b{12%s c", "[[ -e%s ]]", "cat <<E\n$%s\nE", "A=$%s", "echo ${A%%%s}")


def test_no_character_ends_the_process(tmp_path: Path) -> None:
    """In a process of its own, several times: a crash there is a failure here, not of the whole suite."""
    path = tmp_path / "wide.sh"
    lines = [place.replace("%s", char).replace("%%", "%") for place in PLACES for char in WIDE]
    path.write_text("\n".join([*lines, "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2"]))
    program = (
        "import sys; from pathlib import Path; from redline.config.launch.bash import source_of_file\n"
        "from redline.errors import DataError\n"
        "for _ in range(5): source_of_file(Path(sys.argv[1]))[0].parse()"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


@pytest.mark.parametrize("char", WIDE)
def test_values_keep_their_characters_and_lines(char: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"# {char}{char}\nNAME='{char}x'\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 \\\n"
        f'  --save "/data/${{NAME}}/{char}" --hidden-size 64\n'
    )
    launch = read_launch(path)
    save = next(use for use in launch.flags if use.flag == "--save")
    assert save.value == f"/data/{char}x/{char}" and save.line == 4
    assert launch.config.model.hidden_size == 64
