"""What the doctor once said wrongly, of launches that are right or of the wrong thing."""

from pathlib import Path

import pytest
from good_launch import case_of, script
from test_checks import NO_LAYOUT, SMALL

from redline.config.launch import read_launch
from redline.doctor import CHECKS, Case, combined, diagnose, patch_launch
from redline.report.doctor_text import document

TOY = """\
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 256 --bf16 \\
  --train-iters 100 --lr 1e-4 {more}
"""


def ids(case: Case) -> set[str]:
    return {each.id for each in diagnose(case).findings}


TOKENIZERS = (
    "Llama2Tokenizer --tokenizer-model /data/tokenizer.model",
    "TikTokenizer --tokenizer-model /data/tik.json",
    "PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer",
    "NullTokenizer --vocab-size 32000",
)


@pytest.mark.parametrize("words", TOKENIZERS)
def test_tokenizers_of_megatron_are_no_error(words: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, TOY.format(more=f"--tokenizer-type {words}"), gpus=8)
    errors = [each.evidence for each in diagnose(case).findings if each.severity == "error"]
    assert errors == []


def test_fsdp2_allows_no_wgrad_fusion(tmp_path: Path) -> None:
    off: dict[str, str | None] = {"--no-gradient-accumulation-fusion": None}
    check = next(each for each in CHECKS if each.id == "RL105")
    assert check.hits(case_of(tmp_path, script(off)))
    assert not check.hits(case_of(tmp_path, script({**off, "--use-torch-fsdp2": None})))


def test_slices_of_arguments_begin_at_one(tmp_path: Path) -> None:
    """ "${@:2}" is $2 and on."""
    path = tmp_path / "run.sh"
    path.write_text(
        'start() { torchrun --nproc_per_node "$1" pretrain_gpt.py "${@:2}"; }\n'
        "start 8 --num-layers 24 --hidden-size 2048 --num-attention-heads 16\n"
    )
    launch = read_launch(path)
    assert launch.world_size == 8 and launch.config.model.num_layers == 24
    assert [use.flag for use in launch.flags] == ["--num-layers", "--hidden-size", "--num-attention-heads"]


def test_nothing_is_said_of_numbers_that_nobody_stated(tmp_path: Path) -> None:
    """Heads and layers have no default in Megatron-LM: Redline's own must not be judged."""
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --hidden-size 1000\n"
    case = case_of(tmp_path, text, gpus=8)
    assert not {"RL202", "RL102", "RL207"} & ids(case)
    assert diagnose(case).now is None and "RL603" in ids(case)


def test_flags_that_cannot_be_read_are_no_missing_flags(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --tensor-model-parallel-size 4 $(sizes $SIZE)\n"
    )
    assert not [each for each in diagnose(case_of(tmp_path, text, gpus=8)).findings if each.id == "RL603"]


@pytest.mark.parametrize(
    ("name", "value", "slower"), [("NCCL_IB_DISABLE", "1", "network"), ("NCCL_P2P_DISABLE", "1", "node")]
)
def test_slow_links_enter_the_prediction(name: str, value: str, slower: str, tmp_path: Path) -> None:
    good, bad = (case_of(tmp_path, script(env=env)) for env in ({}, {name: value}))
    assert good.cost is not None and bad.cost is not None
    assert bad.cost.step_s > 1.05 * good.cost.step_s
    finding = next(each for each in diagnose(bad).findings if each.id == "RL009")
    assert finding.gain.step_time == pytest.approx(1 - good.cost.step_s / bad.cost.step_s)


def test_microbatches_feed_the_pipeline_first(tmp_path: Path) -> None:
    """RL104 does not take away what RL010 asks for."""
    few = script({"--global-batch-size": "64"})  # 16 microbatches for 4 stages
    assert "RL104" not in ids(case_of(tmp_path, few, gpu="b200"))
    half = script({"--global-batch-size": "64", "--micro-batch-size": "2"})
    finding = next(
        each for each in diagnose(case_of(tmp_path, half, gpu="b200")).findings if each.id == "RL010"
    )
    assert finding.change.values in ({"micro_batch_size": 1}, {"global_batch_size": 128})


def test_a_softmax_that_is_not_run_is_not_missed(tmp_path: Path) -> None:
    """RL106: flash attention has no separate softmax to fuse, and SwiGLU no GELU."""
    off = {"--no-masked-softmax-fusion": None, "--no-bias-gelu-fusion": None}
    assert "RL106" not in ids(case_of(tmp_path, script(off)))
    assert "RL106" in ids(case_of(tmp_path, script({**off, "--attention-backend": "unfused"})))


def test_verdict_out_of_memory(tmp_path: Path) -> None:
    found = diagnose(case_of(tmp_path, script({"--micro-batch-size": "8"})))
    verdict = document(found)["verdict"]
    assert verdict["fits"] is False and verdict["memory_bytes"] > verdict["memory_of_card"]
    assert {each.id for each in found.findings} & {"RL007", "RL303"}


def test_choices_are_those_of_megatron(tmp_path: Path) -> None:
    case = case_of(tmp_path, TOY.format(more="--ckpt-format zarr"), gpus=8)
    finding = next(each for each in diagnose(case).findings if each.id == "RL603")
    assert "torch_dist, torch, torch_dcp, fsdp_dtensor" in finding.evidence and "torch_dist" in finding.mend


def test_wsd_without_its_decay_does_not_start(tmp_path: Path) -> None:
    """Megatron-LM subtracts the missing number: an error, with the flag to give."""
    case = case_of(tmp_path, TOY.format(more="--lr-decay-style WSD"), gpus=8)
    finding = next(each for each in diagnose(case).findings if each.id == "RL603")
    assert finding.severity == "error" and "--lr-wsd-decay-iters" in finding.mend
    fine = case_of(tmp_path, TOY.format(more="--lr-decay-style WSD --lr-wsd-decay-iters 10"), gpus=8)
    assert "RL603" not in ids(fine)


def test_its_own_mends_leave_nothing_to_mend(tmp_path: Path) -> None:
    """mxfp8 on Hopper becomes tensorwise scales, with e5m2 for the gradients: no word of formats is left."""
    text = script({"--fp8-recipe": "mxfp8", "--fp8-format": "e4m3"})
    case = case_of(tmp_path, text)
    patch = patch_launch(case, combined(diagnose(case)))
    again = case_of(tmp_path, patch.text)
    assert not {"RL109", "RL116"} & ids(again)


def test_no_flag_is_written_that_means_nothing(tmp_path: Path) -> None:
    """Recompute taken out is a flag taken out, never "--recompute-granularity none"."""
    for flags in ("--recompute-activations", "--recompute-granularity full --recompute-method uniform "
                  "--recompute-num-layers 1", "--recompute-activations --recompute-granularity full "
                  "--recompute-method uniform --recompute-num-layers 1"):  # fmt: skip
        case = case_of(tmp_path, TOY.format(more=flags), gpus=8, gpu="h200")
        found = diagnose(case)
        assert "none" not in patch_launch(case, combined(found)).text, flags
        assert not [each.mend for each in found.findings if "granularity none" in each.mend]
        assert "recompute" not in patch_launch(case, combined(found)).text, flags


def test_nemo_overrides_under_plain_python(tmp_path: Path) -> None:
    """Nodes and devices of the trainer section are the world; its other names are read as Megatron's."""
    text = (
        "python -u megatron_gpt_pretraining.py trainer.devices=8 trainer.num_nodes=4 trainer.precision=bf16 "
        "model.micro_batch_size=1 model.encoder_seq_length=4096 "
        "model.activations_checkpoint_granularity=full ++model.tensor_model_parallel_size=4\n"
    )
    path = tmp_path / "nemo.sh"
    path.write_text(text)
    launch = read_launch(path)
    assert (launch.world_size, launch.nnodes, launch.nproc_per_node) == (32, 4, 8)
    assert launch.config.precision.bf16 and launch.config.train.seq_length == 4096
    assert launch.config.recompute.recompute_granularity == "full"
    assert not [use for use in launch.flags if use.state == "unknown"]


def test_small_models_of_one_node_keep_their_words(tmp_path: Path) -> None:
    """A launch without tp has nothing to say about queues, NVLink or sequence parallelism."""
    text = script(SMALL, NO_LAYOUT, {"CUDA_DEVICE_MAX_CONNECTIONS": None})
    assert not {"RL006", "RL008", "RL009", "RL201"} & ids(case_of(tmp_path, text, gpus=8))


@pytest.mark.parametrize("size", [32256, 152064])
def test_a_padded_vocabulary_is_a_vocabulary(size: int, tmp_path: Path) -> None:
    case = case_of(tmp_path, TOY.format(more=f"--padded-vocab-size {size}"), gpus=8)
    assert case.setup is not None and case.setup.shape.padded_vocab_size == size
