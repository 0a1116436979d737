"""`redline memory`: right, quick, without torch, and honest about what it does not know."""

import json
import subprocess
import sys

import pytest

from redline.cli.memory import main
from redline.errors import ConfigError


def document(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_document(capsys):
    found = document(capsys, "--preset", "llama3-8b", "--gpu", "h100", "--tensors")
    assert found["parameters"]["total"] == 8_030_261_248
    assert found["megatron"]["weight_and_optimizer_bytes"] == 144_544_702_464
    assert sum(found["memory"]["parts"].values()) == found["memory"]["total"]
    assert found["hardware"]["name"] == "H100 SXM" and found["precision"] == "bf16"
    assert set(found["flops_per_token"]) == {"causal-half", "full"}
    by_tensor = sum(each["times"] * each["num_bytes"] for each in found["saved_tensors"])
    saved = [size for name, size in found["memory"]["parts"].items() if name.startswith("activations")]
    assert by_tensor == sum(saved)


def test_flags_count(capsys):
    small = document(capsys, "--preset", "llama3.2-1b", "--gpu=a100")
    large = document(capsys, "--preset", "llama3.2-1b", "--gpu=a100", "--micro-batch-size", "2")
    assert large["memory"]["total"] > small["memory"]["total"]
    assert large["micro_batch_size"] == large["global_batch_size"] == 2


def test_text(capsys):
    assert main(["--preset", "gpt2-124m", "--gpu", "l4", "--tensors"]) == 0
    text = capsys.readouterr().out
    kept = "attention.core: probabilities"
    for part in ("124,439,808", "attention full", kept, "fits", "Megatron's report"):
        assert part in text, part


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "--gpu NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"], "vocabulary-stated"),
        (["--preset", "llama3-8b", "--gpu", "h1000"], "no data sheet"),
        (["--preset", "llama3-8b", "--gpu"], "--gpu needs a value"),
        (["--preset", "llama3-8b", "--tensor-model-parallel-size", "2"], "tensor-parallel"),
        (["--preset", "llama3-8b", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(ConfigError) as error:
        main(argv)
    assert message in str(error.value)


def test_neither_torch_nor_numpy_is_needed():
    """Every import of the command is quick: nothing heavy, so half a second holds on any machine."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None;"
        "from redline.cli.main import main;"
        "sys.exit(main(['memory', '--preset', 'llama3-8b', '--gpu', 'h200']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "8,030,261,248" in done.stdout
