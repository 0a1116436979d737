"""Misspelt and retired flags are read as meant, and written anew where they stand."""

from pathlib import Path

import pytest
from good_launch import case_of

from redline.doctor import combined, diagnose, facts_of, patch_launch

TEXT = """\
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --num-layer 24 \\
    --hidden-size 2048 \\
    --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size 4 --global-batch-sise 256 \\
    --use-distribted-optimizer \\
    --fp16 --use-flash-attn \\
    --lr 1e-4 --train-iters 10
"""


def test_misspelt_flags_are_mended_in_place(tmp_path: Path) -> None:
    case = case_of(tmp_path, TEXT, gpus=8)
    found = diagnose(case)
    assert found.now is not None, "what was meant is predicted"
    assert found.now.setup.shape.num_layers == 24
    patch = patch_launch(case, combined(found))
    assert patch.undone == []
    assert "    --num-layers 24 \\\n" in patch.text and "--global-batch-size 256 \\\n" in patch.text
    assert "    --use-distributed-optimizer \\\n" in patch.text
    assert "    --bf16 --attention-backend flash \\\n" in patch.text
    again = case_of(tmp_path, patch.text, gpus=8)
    assert not {"RL601", "RL602", "RL003"} & {each.id for each in diagnose(again).findings}
    assert again.config.model.num_layers == 24 and again.config.train.global_batch_size == 256


def test_facts_stay_what_the_script_states(tmp_path: Path) -> None:
    facts = facts_of(diagnose(case_of(tmp_path, TEXT, gpus=8)).case)
    assert facts["num_layers"] is None and facts["use_distributed_optimizer"] is False


def test_new_flags_follow_the_scripts_style(tmp_path: Path) -> None:
    """One flag a line where flags have lines of their own, with the same indent and continuation."""
    case = case_of(tmp_path, TEXT, gpus=8)
    added = [
        line for line in patch_launch(case, combined(diagnose(case))).text.splitlines() if line not in TEXT
    ]
    for line in added:
        assert line.startswith("    --") and line.endswith(" \\") and len(line) < 90, line


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--sequence-paralel", "--sequence-parallel"),
        ("--use-flash-atn", "--attention-backend flash"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--activations-checkpoint-method block", "--recompute-granularity full --recompute-method block"),
    ],
)
def test_replacements(flag: str, words: str, tmp_path: Path) -> None:
    text = TEXT.replace("--lr 1e-4", f"--lr 1e-4 {flag}").replace(" --use-flash-attn", "")
    case = case_of(tmp_path, text, gpus=8)
    name = flag.split()[0]
    mend = next(each.change for each in diagnose(case).findings if name in each.change.rename)
    assert mend.rename == {name: words}
    assert f"--lr 1e-4 {words}" in patch_launch(case, mend).text


@pytest.mark.parametrize(
    "flag", ["--frobnicate 3", "--train-tokens 10", "--sequence-paralel --sequence-parallel"]
)
def test_what_is_not_clear_is_not_rewritten(flag: str, tmp_path: Path) -> None:
    """No near name, a successor in other units, or the right flag given as well: then the wrong one goes."""
    case = case_of(tmp_path, TEXT.replace("--lr 1e-4", f"--lr 1e-4 {flag}"), gpus=8)
    name = flag.split()[0]
    finding = next(each for each in diagnose(case).findings if name in each.evidence)
    assert not finding.change.rename
    assert finding.change.drop == ((name,) if "parallel" in flag else ())


def test_a_later_change_overrules_a_rename(tmp_path: Path) -> None:
    """tp 1 needs no sequence parallelism: its misspelt flag goes, and nothing is left for the hand."""
    flags = "--sequence-paralel --tensor-model-parallel-size 2"
    case = case_of(tmp_path, TEXT.replace("--lr 1e-4", f"--lr 1e-4 {flags}"), gpus=8)
    patch = patch_launch(case, combined(diagnose(case)))
    assert "--sequence-paralel " not in patch.text and patch.undone == []
