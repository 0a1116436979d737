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


def test_megatrons_report_is_of_a_rank_of_the_same_launch(capsys):
    llama = ("--preset", "llama3-8b", "--gpu", "h100")
    one = document(capsys, *llama)["megatron"]
    split = ("--tensor-model-parallel-size", "8", "--sequence-parallel", "--gpus", "16")
    ranks = document(capsys, *llama, *split, "--use-distributed-optimizer")["megatron"]
    assert ranks["flops_per_step"] > one["flops_per_step"]  # of all of them: two data-parallel ranks
    bytes_a_parameter = 18 / (6 + 12 / 2)
    share = one["weight_and_optimizer_bytes"] / ranks["weight_and_optimizer_bytes"]
    assert share == pytest.approx(8 * bytes_a_parameter, rel=0.01)
    assert ranks["activation_bytes"] < one["activation_bytes"] / 2


def test_flags_count(capsys):
    small = document(capsys, "--preset", "llama3.2-1b", "--gpu=a100")
    large = document(capsys, "--preset", "llama3.2-1b", "--gpu=a100", "--micro-batch-size", "2")
    assert large["memory"]["total"] > small["memory"]["total"]
    assert large["micro_batch_size"] == large["global_batch_size"] == 2


def test_the_last_of_several_devices_counts(capsys):
    words = ["--preset", "gpt2-124m", "--gpu", "h200", "--gpus=2", "--gpu=a100", "--gpus", "1"]
    found = document(capsys, *words)
    assert found["hardware"]["name"] == "A100 SXM 80GB" and found["ranks"]["total"] == 1


def test_an_option_given_twice_is_said(capsys):
    assert (
        main(["--preset", "gpt2-124m", "--gpu", "l4", "--num-layers", "2", "--num-layers", "3", "--json"])
        == 0
    )
    out, err = capsys.readouterr()
    assert "--num-layers is given twice: --num-layers 2, then --num-layers 3. The last one counts." in err
    assert json.loads(out)


def test_text(capsys):
    assert main(["--preset", "gpt2-124m", "--gpu", "l4", "--tensors"]) == 0
    text = capsys.readouterr().out
    kept = "attention.core: "
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
        (["--preset", "llama3-8b", "--gpu"], "write for example --gpu h100"),
        (["--preset", "llama3-8b", "--gpus"], "write for example --gpus 64"),
        (["--preset", "llama3-8b", "--against", "--json"], "write for example --against runs/mine"),
        (["--preset", "llama3-8b", "--gpu", "--gpus", "4"], "--gpu needs a value"),
        (["--preset", "demo", "--data-path", "mine_text_document"], "vocabulary-stated"),
        (["--preset", "llama3-8b", "--gpus", "3", "--tensor-model-parallel-size", "2"], "ranks-arranged"),
        (["--preset", "llama3-8b", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(ConfigError) as error:
        main(argv)
    assert message in str(error.value)


STAGED = "--pipeline-model-parallel-size 2 --gpus 2"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--cpu-offloading", "offloaded-layers-stated"),
        ("--cpu-offloading --cpu-offloading-num-layers 40", "offloaded-layers-stated"),
        ("--recompute-activations --recompute-modules moe_act", "recompute-modules-exist"),
        ("--pipeline-model-parallel-size 2", "pipeline-parallel"),
        ("--optimizer sgd --gpus 2", "optimizers"),
        (f"--optimizer sgd {STAGED}", "optimizers"),
        (f"{STAGED} --vocab-size none", "vocabulary-stated"),
        (f"{STAGED} --recompute auto --memory-budget 0.3", "stages-are-coarse"),
        (f"{STAGED} --cpu-offloading --cpu-offloading-num-layers 4", "stages-are-coarse"),
        (f"{STAGED} --tensors", "stages-are-coarse"),
    ],
)
def test_what_is_not_counted_is_refused(words, rule):
    """What `redline train` refuses, but for layouts that the cost model plans; there, what that ignores."""
    with pytest.raises(ConfigError, match=rule):
        main(["--preset", "llama3-8b", "--gpu", "h200", *words.split()])


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


def test_against_a_run(capsys, tmp_path):
    """The measured peak stands beside the prediction, by class."""
    summary = {
        "name": "a run",
        "measured_memory_bytes": 60 << 30,
        "measured_memory": {"weights": 2_471_629_056, "kept_in_reserve": 1 << 30},
        "memory_measure": "peak allocated by PyTorch on the GPU",
        "predicted_memory": {"total": 59 << 30},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    words = ["--preset", "llama3.2-1b", "--gpu", "h200", "--against", str(tmp_path)]
    found = document(capsys, *words)
    against = found["against"]
    assert against["measured_peak_bytes"] == 60 << 30 and against["predicted_by_the_run"] == 59 << 30
    assert against["predicted_over_measured"] == found["memory"]["total"] / (60 << 30)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "against the run a run" in text and "60.00 GiB" in text and "kept in reserve" in text
    with pytest.raises(ConfigError, match="nothing"):
        main([*words[:-1], str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ({"measured_activations": [3]}, "its measured_activations is no object"),
        ({"measured_activations": {"by_module": {"mlp.fc1": "3"}}}, "its measured_activations.by_module"),
        ({"measured_activations": {"by_module": "x"}}, "its measured_activations.by_module"),
        ({"measured_memory": 3}, "its measured_memory is no object"),
        ({"measured_memory_bytes": "3"}, "its measured_memory_bytes is no whole number"),
        ({"world_size": "4"}, "its world_size is no whole number"),
        ({"predicted_memory": {"total": {}}}, "its predicted_memory.total is no whole number"),
    ],
)
def test_a_damaged_summary_is_refused(tmp_path, damaged, says):
    (tmp_path / "summary.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match=says):
        main(["--preset", "llama3.2-1b", "--gpu", "h200", "--against", str(tmp_path)])


def test_against_a_run_alone_reads_its_options(capsys, tmp_path):
    """Its options and its device, from the files that the run left."""
    words = ["--preset", "llama3.2-1b", "--micro-batch-size", "2"]
    wanted = document(capsys, *words, "--gpu", "h200")["memory"]["total"]
    (tmp_path / "config.toml").write_text('[model]\npreset = "llama3.2-1b"\n[train]\nmicro_batch_size = 2\n')
    summary = {
        "name": "a run", "hardware": {"name": "NVIDIA H200"}, "measured_memory_bytes": wanted,
        "predicted_memory": {"total": 1 << 30},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = document(capsys, "--against", str(tmp_path))
    assert found["against"]["predicted_over_measured"] == 1 and found["hardware"]["name"] == "H200 SXM"
    assert main(["--against", str(tmp_path)]) == 0
    assert "the run itself predicted" in capsys.readouterr().out


SMALL = "[model]\nnum_layers = 2\nhidden_size = 32\nnum_attention_heads = 2\n[train]\nseq_length = 64\n"
SMALL_WORDS = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64"


def run_of_300_tokens(folder, options=SMALL):
    """A run's folder whose vocabulary only its summary tells, by the number of parameters."""
    wanted = 64 * 32 + 300 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32  # positions, tokens, layers, norm
    summary = {"parameters": wanted, "hardware": {"name": "NVIDIA H200", "kind": "cuda"}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.toml").write_text(options)
    return wanted


@pytest.mark.parametrize("preset", ["", 'preset = "demo"\n'])
def test_against_a_run_alone_takes_its_own_vocabulary(capsys, tmp_path, preset):
    """That of the tokenizer beside its data, by parameters or a checkpoint: not refused, nor the demo's."""
    rest = (
        "group_query_attention = false\nactivation_func = 'gelu-tanh'\nnormalization = 'LayerNorm'\n"
        "position_embedding_type = 'learned_absolute'\nadd_bias_linear = true\nffn_hidden_size = 128\n"
    )
    options = SMALL.replace("[model]\n", f"[model]\n{preset}{rest}")
    wanted = run_of_300_tokens(tmp_path, options)
    found = document(capsys, "--against", str(tmp_path))
    assert found["model"]["vocab_size"] == 300 and found["parameters"]["total"] == wanted
    checkpoint = tmp_path / "checkpoints" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "values.json").write_text('{"model": {"vocab_size": 301}}')
    assert document(capsys, "--against", str(tmp_path))["model"]["vocab_size"] == 301


def test_an_option_beside_a_run_acts_on_top_of_its_own(capsys, tmp_path):
    """Its model, device and vocabulary stay; a --preset or a file is a configuration of its own."""
    run_of_300_tokens(tmp_path)
    against = ["--against", str(tmp_path)]
    found = document(capsys, *against, "--micro-batch-size", "3")
    assert found["micro_batch_size"] == 3 and found["model"]["hidden"] == 32
    assert found["hardware"]["name"] == "H200 SXM" and found["model"]["vocab_size"] == 300
    assert document(capsys, *against, "--vocab-size", "500")["model"]["vocab_size"] == 500
    assert document(capsys, *against, "--device", "cpu")["hardware"]["kind"] == "cpu"
    assert document(capsys, *against, "--preset", "gpt2-124m")["model"]["hidden"] == 768


def test_a_run_that_does_not_tell_its_model_is_refused(capsys, tmp_path):
    """No vocabulary recorded, or no options left: said, and what the user states himself is taken."""
    against = ["--against", str(tmp_path)]
    wanted = run_of_300_tokens(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"parameters": wanted + 1}))
    with pytest.raises(ConfigError, match="vocabulary is not recorded"):
        main(against)
    assert document(capsys, *against, "--vocab-size", "300")["parameters"]["total"] == wanted
    (tmp_path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"own options are not known: there is no .*config\.toml"):
        main([*against, "--micro-batch-size", "2"])
    stated = document(capsys, *against, *SMALL_WORDS.split(), "--vocab-size", "300")
    assert stated["parameters"]["total"] == wanted


def test_against_a_run_on_several_ranks_counts_its_shards(capsys, tmp_path):
    """The run's own number of ranks, unless --gpus states another; text and document say which."""
    words = ["--preset", "llama3.2-1b", "--gpu", "h200", "--use-distributed-optimizer"]
    (tmp_path / "summary.json").write_text(json.dumps({"name": "a run", "world_size": 4}))
    against = [*words, "--against", str(tmp_path)]
    four = document(capsys, *words, "--gpus", "4")
    found = document(capsys, *against)
    assert found["memory"] == four["memory"] and found["ranks"] == {"total": 4, "tp": 1, "dp": 4}
    assert document(capsys, *against, "--gpus", "2")["ranks"]["dp"] == 2
    assert main(words) == 0
    assert "state how many there are with --gpus" in " ".join(capsys.readouterr().out.split())


def test_recompute_auto_says_what_it_chose(capsys):
    """Choice, saving and cost beforehand; and that nothing fits, where that is so."""
    words = "--preset llama3-8b --seq-length 8192 --recompute auto --use-distributed-optimizer --gpus 8"
    found = document(capsys, *words.split(), "--gpu", "h100")
    (choice,) = [each for each in found["choices"] if each["what"] == "recompute"]
    assert choice["ran"] != "nothing" and "of a step's time" in choice["why"]
    assert main([*words.split(), "--gpu", "h100"]) == 0
    assert choice["ran"] in " ".join(capsys.readouterr().out.split())
    assert main([*words.split(), "--gpu", "l4"]) == 0
    assert "nothing fits the budget" in " ".join(capsys.readouterr().out.split())


def test_what_does_not_fit_comes_with_changes_that_would(capsys):
    """Each planned again on the device, warm-up or not; where all is well nothing is said."""
    words = ["--preset", "llama3.2-1b", "--micro-batch-size", "4", "--seq-length", "8192"]
    words += ["--lr-warmup-iters", "100"]
    small = document(capsys, *words, "--gpu", "a100-40gb")
    assert small["memory"]["reserved"] > small["hardware"]["memory_bytes"]
    assert small["lighter"]
    assert all(each["reserved_bytes"] <= small["hardware"]["memory_bytes"] for each in small["lighter"])
    assert "lighter" not in document(capsys, *words, "--gpu", "h200")
    assert main([*words, "--gpu", "a100-40gb"]) == 0
    assert "any of these would fit: (1) --" in " ".join(capsys.readouterr().out.split())


def test_another_model_than_the_run_had_is_named(capsys, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"parameters": 127_000}))
    assert main(["--preset", "llama3.2-1b", "--gpu", "h200", "--against", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"against the run {tmp_path.name}" in text
    assert "another model: parameters 1,235,814,400 127,000" in text


def test_stages_of_a_layout(capsys):
    """The first stage has the most microbatches in flight, the last the logits; middle ones no vocabulary."""
    words = (
        "--preset llama3-70b --bf16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--sequence-parallel --use-distributed-optimizer --global-batch-size 128 --gpus 64"
    )
    first, second, third, last = document(capsys, *words.split())["stages"]
    for part in ("activations_attention", "activations_mlp", "fragmentation"):
        assert first[part] > second[part] > third[part] > last[part] > 0
    for stage in (first, second, third, last):
        assert sum(stage.values()) == pytest.approx(2 * stage["total"])
    assert first["logits"] == third["logits"] == 0 < last["logits"]
    assert first["weights"] == last["weights"] > second["weights"] == third["weights"]
    total = sum(stage["weights"] for stage in (first, second, third, last)) * 8 / 2
    assert total == pytest.approx(70_553_706_496, rel=0.01)
    assert main(words.split()) == 0 and "stage 3 of 64 ranks" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--gpus zero"):
        main(["--preset", "llama3-70b", "--gpus", "zero"])


def test_ranks_that_train_are_counted_exactly(capsys):
    """A layout that `redline train` takes: tensor by tensor, its shards a part each."""
    words = "--preset llama3.2-1b --gpu h200 --use-distributed-optimizer --global-batch-size 8"
    one, eight = (
        document(capsys, *words.split(), "--gpus", ranks)["memory"]["parts"] for ranks in ("1", "8")
    )
    assert eight["main_params"] == -(-one["main_params"] // 8) and eight["weights"] == one["weights"]
    assert eight["activations_mlp"] == one["activations_mlp"] > 0


def test_fp8_copies_of_a_stage(capsys):
    """A byte a weight of the layers, two with the transposed one; none where weights are fp8 themselves."""
    words = (
        "--preset llama3-70b --fp8 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--sequence-parallel --use-distributed-optimizer --global-batch-size 64 --gpus 64 --gpu h100"
    )
    beside = [*words.split(), "--no-fp8-param-gather"]
    plain = document(capsys, *beside)["stages"][1]
    both = document(capsys, *beside, "--keep-fp8-transpose-cache")["stages"][1]
    assert 2 * plain["fp8_copies"] == pytest.approx(plain["weights"], rel=0.07)
    assert both["fp8_copies"] == 2 * plain["fp8_copies"]
    for how, copies in ("", 0), ("--fp8-param-gather", 0), ("--keep-fp8-transpose-cache", 1):
        stage = document(capsys, *words.split(), *how.split())["stages"][1]
        assert stage["fp8_copies"] == copies * plain["fp8_copies"]
        assert stage["weights"] == pytest.approx(plain["weights"] - plain["fp8_copies"], abs=1)


@pytest.mark.parametrize("samples", ["1", "2", "4"])
def test_training_in_fp8_holds_less_than_in_bf16(capsys, samples):
    """In every batching: a byte a weight less, and what GEMMs keep. A copy beside weights outweighed that."""
    words = (
        "--preset llama3-8b --num-layers 8 --seq-length 8192 --global-batch-size 4 --bf16 --gpu h200 "
        f"--micro-batch-size {samples}"
    )
    peaks = {
        how: document(capsys, *words.split(), *how.split())["memory"]["total"]
        for how in ("", "--fp8", "--fp8 --no-fp8-param-gather")
    }
    layers = 8 * 4096 * (4096 + 4096 + 2 * 1024 + 3 * 14336)
    assert peaks["--fp8"] < peaks[""] - layers
    assert peaks["--fp8"] == peaks["--fp8 --no-fp8-param-gather"] - 2 * layers


def test_experts_are_divided_by_their_own_ranks(capsys):
    """B079: Mixtral 8x7B at tp 4, ep 8: a GPU holds the experts over ep x etp, the rest over tp."""
    words = (
        "--preset llama3-8b --vocab-size 32000 --num-experts 8 --moe-ffn-hidden-size 14336 "
        "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
        "--sequence-parallel --global-batch-size 16 --gpus 32"
    )
    (stage,) = document(capsys, *words.split())["stages"]
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = 46_702_792_704 - experts
    assert stage["weights"] == pytest.approx(2 * (experts / 8 + dense / 4), rel=0.01)
