"""Findings, gains, the verdict, and what is combined."""

from pathlib import Path

import pytest
from good_launch import case_of, script

from redline.config.tree import options_by_field
from redline.doctor import CHECKS, Mend, change_text, combined, diagnose, facts_of

BAD = {
    "--transformer-impl": "local",
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
}
WITHOUT = ("--sequence-parallel", "--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather",
           "--fp8-format", "--fp8-recipe", "--first-last-layers-bf16", "--fp8-param-gather")  # fmt: skip


def test_verdict_and_order(tmp_path: Path) -> None:
    found = diagnose(case_of(tmp_path, script(BAD, WITHOUT)))
    assert found.now is not None and found.after is not None
    assert found.after.tokens_per_s > 1.5 * found.now.tokens_per_s
    assert found.after.memory.total <= 80 * 2**30
    listed = [each.id for each in found.findings]
    assert {"RL001", "RL002", "RL005", "RL006", "RL007", "RL012"} <= set(listed)
    assert len(listed) == len({(each.id, each.evidence) for each in found.findings})
    after_errors = [each for each in found.findings if each.severity != "error"]
    gains = [each.gain.step_time or 0.0 for each in after_errors]
    assert gains == sorted(gains, reverse=True)


def test_gains_are_the_cost_models(tmp_path: Path) -> None:
    case = case_of(tmp_path, script(without=("--sequence-parallel", "--tp-comm-overlap")))
    finding = next(each for each in diagnose(case).findings if each.id == "RL006")
    after = case.after(Mend(values={"sequence_parallel": True}))
    assert case.cost is not None and after is not None
    assert finding.gain.step_time == pytest.approx(1 - after.step_s / case.cost.step_s)
    assert finding.gain.memory_bytes == pytest.approx(case.cost.memory.total - after.memory.total, abs=1)
    assert "cost model" in finding.gain.basis and finding.mend == "--sequence-parallel"


def test_mends_upon_mends(tmp_path: Path) -> None:
    """Less recompute fits only once the scores are gone: it shows as a gain on top of the other changes."""
    case = case_of(tmp_path, script(BAD, WITHOUT))
    alone = next((hit for each in CHECKS if each.id == "RL007" for hit in each.hits(case)), None)
    found = diagnose(case)
    recompute = next(each for each in found.findings if each.id == "RL007")
    assert "on top of" in recompute.gain.basis and (recompute.gain.step_time or 0) > 0.05
    assert alone is None or case.saved(alone.mend) < (recompute.gain.step_time or 0)
    assert found.after is not None and found.after.memory.total <= 0.92 * 80 * 2**30


def test_redline_is_not_advised_what_it_refuses(tmp_path: Path) -> None:
    text = script(without=("--use-distributed-optimizer", *WITHOUT))
    for finding in diagnose(case_of(tmp_path, text, dialect="redline")).findings:
        refusals = [options_by_field()[name].refusal(value) for name, value in finding.change.values.items()]
        assert not any(refusals), finding


def test_advice_is_never_applied(tmp_path: Path) -> None:
    found = diagnose(case_of(tmp_path, script(BAD, WITHOUT)))
    advice = next(each for each in found.findings if each.id == "RL012")
    assert not advice.change.safe and advice not in found.applied
    assert "fp8_format" not in combined(found).values


def test_unknown_gpu_or_layout_predicts_nothing(tmp_path: Path) -> None:
    nothing = diagnose(case_of(tmp_path, script(), gpu=None))
    assert nothing.now is None and nothing.after is None
    odd = diagnose(case_of(tmp_path, script(), gpus=60))
    assert odd.now is None and "RL217" in {each.id for each in odd.findings}


def test_change_text(tmp_path: Path) -> None:
    case = case_of(tmp_path, script({"--fp16": None}, ("--bf16", "--grad-reduce-in-bf16")))
    mend = Mend(values={"fp16": False, "bf16": True, "seq_length": 4096}, environment={"A": "1", "B": None})
    assert change_text(case, mend) == "--bf16 --seq-length 4096, without --fp16, export A=1, unset B"
    assert change_text(case, Mend()) == "by hand"
    assert change_text(case, Mend(values={"seq_length": 8192})) == "by hand"  # it is so already


def test_chinese(tmp_path: Path) -> None:
    found = diagnose(case_of(tmp_path, script(BAD, WITHOUT)), lang="zh")
    assert len(found.findings) > 8
    for each in found.findings:
        for text in (each.title, each.why):
            assert any("\u4e00" <= letter <= "\u9fff" for letter in text), (each.id, text)


FACTS = {
    "world_size": 64, "tp": 4, "pp": 4, "cp": 1, "ep": 1, "vpp": 5, "dp": 4, "micro_batch_size": 1,
    "global_batch_size": 512, "num_microbatches": 128, "num_layers": 80, "hidden_size": 8192,
    "num_attention_heads": 64, "num_query_groups": 8, "ffn_hidden_size": 28672, "seq_length": 8192,
    "num_experts": 0, "mtp_num_layers": 0, "precision": "bf16", "fp8": "hybrid",
    "transformer_impl": "transformer_engine", "attention_backend": "auto", "use_distributed_optimizer": True,
    "overlap_grad_reduce": True, "overlap_param_gather": True, "sequence_parallel": True, "recompute": "none",
    "cuda_device_max_connections": 1,
}  # fmt: skip


def test_facts(tmp_path: Path) -> None:
    assert facts_of(case_of(tmp_path, script())) == FACTS


def test_facts_that_cannot_be_known(tmp_path: Path) -> None:
    text = script(
        {"--tensor-model-parallel-size": "$TP"}, ("--hidden-size",), {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    )
    found = facts_of(case_of(tmp_path, text))
    assert found["tp"] is None and found["dp"] is None and found["num_microbatches"] is None
    assert found["hidden_size"] is None and found["cuda_device_max_connections"] is None
    assert found["pp"] == 4 and found["seq_length"] == 8192


def test_facts_are_defaults_of_megatron(tmp_path: Path) -> None:
    text = script(
        without=("--group-query-attention", "--ffn-hidden-size", "--fp8-format", "--overlap-grad-reduce")
    )
    found = facts_of(case_of(tmp_path, text))
    assert found["num_query_groups"] == 64 and found["ffn_hidden_size"] == 21824
    assert found["fp8"] == "none" and found["overlap_grad_reduce"] is False
