"""Every rule: a command line that breaks it, the repaired one that does not."""

from __future__ import annotations

import shlex

import pytest

from redline.config import RULES, InvalidConfigError, batch_schedule, options, parse_args, split_shares

GBS8 = "--global-batch-size 8"
AWARE = "--use-precision-aware-optimizer"
FULL = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
SHARDED = "--use-distributed-optimizer"
BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --train-iters 100"
PROFILE = "--profile --use-pytorch-profiler"
ROPE = "--position-embedding-type rope"

WIDE_SUM = f"{SHARDED} --bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation"
TP_OVERLAP = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
CHUNKS = f"{TP_OVERLAP} --micro-batch-size 1 --seq-length 32 --tp-comm-overlap-chunks"

# rule -> [(words that break it, words that do not)]
ENDS = "--fp8 --first-last-layers-bf16"
TE = "--transformer-impl transformer_engine"
CASES: dict[str, list[tuple[str, str]]] = {
    "heads-divide-hidden": [("--num-attention-heads 5", "--num-attention-heads 5 --kv-channels 16")],
    "groups-divide-heads": [
        ("--group-query-attention --num-query-groups 3", "--group-query-attention --num-query-groups 2")
    ],
    "window-before": [
        ("--window-size 16 1", "--window-size 16 0"),
        ("--window-size -1 0", "--window-size 0 0"),
    ],
    "groups-stated": [("--group-query-attention", "--group-query-attention --num-query-groups 1")],
    "positions-cover-sequence": [
        ("--max-position-embeddings 512", "--max-position-embeddings 512 --seq-length 512")
    ],
    "rotary-channels": [(f"{ROPE} --rotary-percent 0.1", f"{ROPE} --rotary-percent 0.5")],
    "padding-covers-vocabulary": [
        ("--vocab-size 100 --padded-vocab-size 99", "--vocab-size 100 --padded-vocab-size 100")
    ],
    "paths-of-splits": [
        ("--train-data-path a --data-path b", "--train-data-path a --valid-data-path b"),
        ("--train-data-path a --split 1,1", "--data-path a --split 1,1"),
        ("--valid-data-path a", "--train-data-path a"),
    ],
    "mock-data-reads-nothing": [
        ("--mock-data --data-cache-path c", "--mock-data"),
        ("--mock-data --no-mmap-bin-files", "--data-path a --no-mmap-bin-files"),
    ],
    "split-shares": [
        ("--split 1,2,3,4", "--split 1,2,3"),
        ("--split 0,0", "--split 1"),
        ("--split -1,2", "--split 1,2"),
    ],
    "tokenizer-files": [
        ("--vocab-file v", "--vocab-file v --merge-file m"),
        ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model t"),
        ("--tokenizer-type ByteTokenizer --tokenizer-model t", "--tokenizer-type ByteTokenizer"),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer --vocab-size 9"),
        ("--tokenizer-type ByteTokenizer --eod-token x", "--tokenizer-model t --eod-token x"),
    ],
    "length-stated": [("--train-iters none", "--train-iters none --train-samples 9")],
    "wide-sum-and-instances": [
        (
            f"{WIDE_SUM} --num-distributed-optimizer-instances 2",
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
        )
    ],
    "chunks-of-rows": [
        (f"{CHUNKS} 17", f"{CHUNKS} 16"),
        (f"{CHUNKS} 7", f"{CHUNKS} 6"),
    ],
    "straggler-and-joined-gemms": [
        (f"{TP_OVERLAP} --log-straggler", f"{TP_OVERLAP} --tp-comm-overlap-method chunked --log-straggler"),
        (
            "--tensor-model-parallel-size 2 --use-torch-compile --log-straggler",
            "--use-torch-compile --log-straggler",
        ),
    ],
    "graphs-and-ranks": [("--cuda-graph --use-distributed-optimizer", "--cuda-graph")],
    "graphs-and-fp8": [("--cuda-graph --fp8", "--cuda-graph --bf16")],
    "graphs-and-tp": [("--cuda-graph --tensor-model-parallel-size 2", "--cuda-graph")],
    "packing-resets": [
        ("--packing --reset-position-ids", "--reset-position-ids"),
        ("--dataloader-inter-document-masking --reset-attention-mask", "--packing"),
    ],
    "batch-of-microbatches": [
        ("--micro-batch-size 3 --global-batch-size 8", "--micro-batch-size 4 --global-batch-size 8")
    ],
    "rampup-steps": [
        (f"{GBS8} --rampup-batch-size 9 1 5", f"{GBS8} --rampup-batch-size 2 2 5"),
        (f"{GBS8} --rampup-batch-size 1 3 5", f"{GBS8} --rampup-batch-size 2 3 5"),
        (
            f"--micro-batch-size 2 {GBS8} --rampup-batch-size 1 1 5",
            f"--micro-batch-size 2 {GBS8} --rampup-batch-size 4 2 5",
        ),
    ],
    "batch-schedule": [
        ("--step-batch-size-schedule 1:2", '--step-batch-size-schedule "0:2 1.5K:4"'),
        (
            "--micro-batch-size 2 --step-batch-size-schedule 0:3",
            "--micro-batch-size 2 --step-batch-size-schedule 0:4",
        ),
    ],
    "schedule-units": [
        ("--lr-decay-samples 50", "--lr-decay-iters 50"),
        ("--train-iters none --train-samples 9 --lr-warmup-iters 2", "--train-iters none --train-samples 9"),
    ],
    "warmup-before-decay": [
        ("--lr-warmup-iters 100", "--lr-warmup-iters 99"),
        ("--lr-warmup-iters 10 --lr-decay-iters 10", "--lr-warmup-iters 10 --lr-decay-iters 11"),
    ],
    "warmup-exists": [("--lr-warmup-init 1e-6", "--lr-warmup-init 1e-6 --lr-warmup-iters 5")],
    "rates-ordered": [
        ("--lr 1e-4 --min-lr 1e-3", "--lr 1e-3 --min-lr 1e-4"),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"),
    ],
    "wsd-length": [
        ("--lr-decay-style WSD", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 101", "--lr-decay-style WSD --lr-wsd-decay-iters 100"),
    ],
    "weight-decay-ends": [
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1",
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
        ),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
            "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2",
        ),
    ],
    "loss-scale-bounds": [
        ("--fp16 --min-loss-scale 8 --initial-loss-scale 4", "--fp16 --min-loss-scale 4")
    ],
    "gradient-dtype": [
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--bf16 --grad-reduce-in-bf16")
    ],
    "profile-window": [
        (f"{PROFILE} {bad}", f"{PROFILE} {good}")
        for bad, good in (
            ("--profile-step-start 5 --profile-step-end 3", "--profile-step-start 5 --profile-step-end 6"),
            ("--profile-step-start 12", "--profile-step-start 11"),
            ("--train-iters 10", "--train-iters 11"),
        )
    ],
    "source-of-weights": [("--finetune", "--finetune --load x")],
    "tp-divides-heads": [
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 2"),
        (
            "--num-attention-heads 12 --hidden-size 48 --group-query-attention --num-query-groups 6 "
            "--tensor-model-parallel-size 4",
            "--num-attention-heads 12 --hidden-size 48 --group-query-attention --num-query-groups 6 "
            "--tensor-model-parallel-size 12",
        ),
    ],
    "sequence-parallel-needs-tp": [
        ("--sequence-parallel", "--sequence-parallel --tensor-model-parallel-size 2")
    ],
    "compile-and-tp-overlap": [
        (
            "--use-torch-compile --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "--use-torch-compile --tensor-model-parallel-size 2 --sequence-parallel",
        ),
    ],
    "tp-splits-sequence": [
        (
            "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 513",
            "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 514",
        )
    ],
    "cp-splits-sequence": [
        ("--context-parallel-size 4 --seq-length 500", "--context-parallel-size 4 --seq-length 504")
    ],
    "cp-levels": [
        ("--cp-comm-type p2p a2a", "--cp-comm-type p2p a2a p2p a2a"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p",
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        ),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        ),
    ],
    "pp-divides-layers": [
        (
            "--pipeline-model-parallel-size 3",
            "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2",
        )
    ],
    "split-needs-stages": [
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 2",
            "--pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
    ],
    "virtual-stages-divide": [
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        )
    ],
    "experts-divide": [
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 --num-experts 8"),
        ("--expert-model-parallel-size 3 --num-experts 8", "--expert-model-parallel-size 4 --num-experts 8"),
        ("--num-experts 2 --moe-router-topk 3", "--num-experts 4 --moe-router-topk 3"),
    ],
    "gather-overlap-needs": [
        ("--overlap-param-gather", f"--overlap-param-gather --overlap-grad-reduce {SHARDED}"),
        (
            "--overlap-param-gather --overlap-grad-reduce",
            f"--overlap-param-gather --overlap-grad-reduce {SHARDED}",
        ),
    ],
    "tp-overlap-needs": [
        ("--tp-comm-overlap", "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2"),
        (
            "--tp-comm-overlap --tensor-model-parallel-size 2",
            "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
        ),
    ],
    "deterministic-collectives": [
        (
            "--deterministic-mode --tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
            "--deterministic-mode --sequence-parallel --tensor-model-parallel-size 2",
        )
    ],
    "full-recompute-states": [
        (
            "--recompute-granularity full --recompute-method block",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ),
        ("--recompute-granularity full", "--recompute-activations"),
    ],
    "saved-activations-spread": [
        (
            f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2 {more}",
            f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2",
        )
        for more in ("--sequence-parallel", "--tensor-model-parallel-size 1")
    ],
    "bf16-gradients-beside-bf16": [
        (f"{AWARE} --main-grads-dtype bf16 --{other}", f"{AWARE} --main-grads-dtype bf16 --bf16")
        for other in ("fp16", "fp32", "fp64")
    ],
    "moments-in-8-bits": [
        (f"{AWARE} --{moment}-dtype fp8 --fp64", f"{AWARE} --{moment}-dtype fp8 --bf16")
        for moment in ("exp-avg", "exp-avg-sq")
    ],
    "recompute-auto-or-stated": [("--recompute auto --recompute-activations", "--recompute auto")],
    "residual-norm-keeps-its-block": [
        (
            f"--fused-residual-rmsnorm --recompute-activations --recompute-modules {name}",
            "--fused-residual-rmsnorm --recompute-activations",
        )
        for name in ("layernorm", "mlp")
    ],
    "residual-norm-in-16-bits": [
        ("--fused-residual-rmsnorm --bf16 --fp8-format hybrid", "--fused-residual-rmsnorm --bf16")
    ],
    "recompute-modules-exist": [
        (f"--recompute-activations --recompute-modules {name}", "--recompute-activations")
        for name in ("moe", "mla_up_proj")
    ],
    "offloaded-layers-stated": [
        ("--cpu-offloading", "--cpu-offloading --cpu-offloading-num-layers 1"),
        ("--cpu-offloading --cpu-offloading-num-layers 99", "--cpu-offloading --cpu-offloading-num-layers 1"),
    ],
    "compiled-blocks-stay": [
        (
            "--cpu-offloading --cpu-offloading-num-layers 1 --use-torch-compile",
            "--cpu-offloading --cpu-offloading-num-layers 1",
        ),
    ],
    "graphs-and-full-recompute": [
        (
            f"{FULL} --cuda-graph-impl {impl}",
            f"{FULL} --cuda-graph-impl full_iteration",
        )
        for impl in ("local", "transformer_engine")
    ],
    "graphs-keep-what-they-save": [
        ("--cuda-graph --recompute auto", "--cuda-graph --recompute-activations"),
        ("--cuda-graph --cpu-offloading --cpu-offloading-num-layers 1", "--cuda-graph"),
    ],
    "fp8-or-fp4": [("--fp8 --fp4-format e2m1", "--fp8")],
    "fp8-over-half": [("--fp8 --fp32", "--fp8 --bf16")],
    "fp8-tp-overlap": [
        (f"--fp8 {TP_OVERLAP} {words}", f"--fp8 {TP_OVERLAP}")
        for words in ("--fp8-recipe blockwise", "--fp8-recipe mxfp8 --fp8-emulate", "--no-fp8-wgrad")
    ],
    "fp8-tp-overlap-method": [
        (
            f"--fp8 {TP_OVERLAP} --tp-comm-overlap-method {method}",
            f"--fp8 {TP_OVERLAP} --tp-comm-overlap-method {other}",
        )
        for method, other in (("pushed", "chunked"), ("symmetric", "plain"))
    ],
    "fp4-gather-needs": [
        ("--fp4-format e2m1 --fp4-param-gather", f"--fp4-format e2m1 --fp4-param-gather {SHARDED}")
    ],
    "transformer-engine-on-one-rank": [(f"{TE} --tensor-model-parallel-size 2", TE)],
    "transformer-engine-runs-eagerly": [
        (f"{TE} {words}", TE) for words in ("--use-torch-compile", "--cuda-graph-impl local")
    ],
    "transformer-engine-fuses-by-itself": [
        (f"{TE} {words}", f"{TE} --no-gradient-accumulation-fusion")
        for words in ("--no-bias-swiglu-fusion", "--bias-gelu-fusion", "--fused-residual-rmsnorm", "--fp64")
    ],
    "transformer-engine-gates-plainly": [
        (f"{TE} --swiglu {words}", f"{TE} --swiglu")
        for words in ("--activation-func-clamp-value 7", "--glu-linear-offset 1")
    ],
    "transformer-engine-keeps-its-tensors": [
        (f"{TE} --cpu-offloading --cpu-offloading-num-layers 1", TE),
        (f"{TE} --recompute auto", TE),
        (f"{TE} --fp8 {FULL}", f"{TE} {FULL}"),
        (f"{TE} --recompute-activations --recompute-modules layernorm", f"{TE} --recompute-activations"),
        (
            f"{TE} --fp8 --recompute-activations --recompute-modules mlp",
            f"{TE} --recompute-activations --recompute-modules mlp",
        ),
    ],
    "transformer-engine-casts-by-itself": [
        (f"{TE} --fp8 {words}", f"{TE} --fp8 --fp8-margin 1 --first-last-layers-bf16")
        for words in (
            "--no-fp8-wgrad", "--fp8-interval 2", "--fp8-keep-bf16 layers.0.*", "--fp8-stats-interval 9",
            "--fp8-return-to-bf16 9", "--fp8-output-proj", "--fp8-recipe blockwise --fp8-emulate",
            f"{SHARDED} --fp8-param-gather", "--keep-fp8-transpose-cache", "--no-parameter-transpose-cache",
        )
    ],
    "fp8-gather-recipe": [
        (f"--fp8 --fp8-recipe {recipe} {flag}", f"--fp8 --fp8-recipe tensorwise {flag}")
        for recipe in ("blockwise", "mxfp8")
        for flag in ("--keep-fp8-transpose-cache", f"--fp8-param-gather {SHARDED}")
    ],
    "offload-something": [
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0",
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.01",
        )
    ],
    "fp8-gather-storage": [
        (f"--fp8 --fp8-param-gather {SHARDED} {flag}", f"--fp8 {SHARDED} {flag}")
        for flag in ("--use-precision-aware-optimizer", "--fp8-return-to-bf16 2")
    ],
    "fp8-casts-kept": [
        (f"--fp8 --no-parameter-transpose-cache {flag}", f"--fp8 {flag}")
        for flag in ("--keep-fp8-transpose-cache", "--fp8-param-gather", "--fp8-recipe mxfp8 --fp8-emulate")
    ],
    "fp8-first-last-keeps-some": [
        (f"{ENDS} --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0", f"{ENDS} {flag} 0")
        for flag in ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
    ],
    "mtp-positions": [
        ("--mtp-num-layers 1", f"--mtp-num-layers 1 {ROPE}"),
        (f"--mtp-num-layers 1 --mtp-hsm {ROPE}", f"--mtp-num-layers 2 --mtp-hsm {ROPE}"),
    ],
}  # fmt: skip

FLAT = [(rule, bad, good) for rule, cases in CASES.items() for bad, good in cases]
TRAINING_ONLY = {rule.name for rule in RULES if rule.training}


def broken(words: str, *, training: bool) -> dict[str, str]:
    try:
        parse_args(shlex.split(f"{BASE} {words}"), training=training)
    except InvalidConfigError as error:
        return {problem.rule: str(problem) for problem in error.problems}
    return {}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == {rule.name for rule in RULES}


def test_rules_name_options() -> None:
    names = {option.field for option in options()}
    assert all(set(rule.fields) <= names for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("rule", "bad", "good"), FLAT)
def test_rule_breaks_and_holds(rule: str, bad: str, good: str) -> None:
    """The broken line breaks this rule alone; the good one breaks none."""
    training = rule in TRAINING_ONLY
    assert broken(bad, training=training).keys() == {rule}
    assert broken(good, training=training) == {}


def test_param_gather_overlap_names_what_is_missing() -> None:
    """B063: gather overlap alone names both flags to add."""
    said = broken("--overlap-param-gather", training=False)["gather-overlap-needs"]
    assert "add --use-distributed-optimizer and --overlap-grad-reduce" in said
    said = broken("--overlap-param-gather --overlap-grad-reduce", training=False)["gather-overlap-needs"]
    assert "add --use-distributed-optimizer." in said


@pytest.mark.parametrize("end", ["start", "end"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_counts_of_bf16_layers_need_their_switch(end: str, count: int) -> None:
    """Megatron's default, given by name, is no exception: it would keep nothing."""
    words = f"--num-layers-at-{end}-in-bf16 {count}"
    (problem,) = broken(f"--fp8 {words}", training=False).values()
    assert "--first-last-layers-bf16" in problem
    if count:
        assert not broken(f"{ENDS} {words}", training=False)


def test_margins_that_leave_nothing_of_a_value_are_refused() -> None:
    (problem,) = broken("--fp8 --fp8-margin 15", training=False).values()
    assert "at most 14" in problem
    assert not broken("--fp8 --fp8-margin 14", training=False)


def test_tp_overlap_names_the_conflict_before_launch() -> None:
    """B065: tp-comm-overlap without tp > 1 or sequence parallelism."""
    assert "tp > 1 and --sequence-parallel" in broken("--tp-comm-overlap", training=False)["tp-overlap-needs"]


EXCLUSIVE = {
    "precision": ("--bf16 --fp16", "--fp32 --fp64"),
    "length": ("--train-samples 5",),
    "batch": ("--global-batch-size 2 --step-batch-size-schedule 0:2",),
    "data": ("--mock-data --data-path a",),
    "qk-norm": ("--qk-layernorm --qk-l2-norm",),
    "lr-warmup": ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1",),
    "lr-decay": ("--lr-decay-iters 5 --lr-decay-samples 5",),
    "scheduler": ("--load x --override-opt_param-scheduler --use-checkpoint-opt-param-scheduler",),
}


@pytest.mark.parametrize(
    ("group", "words"), [(group, line) for group, lines in EXCLUSIVE.items() for line in lines]
)
def test_exclusive_options(group: str, words: str) -> None:
    assert f"one-of/{group}" in broken(words, training=False)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("0:768 250B:1536", ((0, 768), (250 * 10**9, 1536))),
        ("0:1, 1.5k:2", ((0, 1), (1500, 2))),
        ("0:1", ((0, 1),)),
        ("1:2", None),
        ("0:2 5:3 5:4", None),
        ("0:2 5:3 4:4", None),
        ("0:0", None),
        ("0:x", None),
        ("0", None),
        ("", None),
        ("0:1 5X:2", None),
        ("0:1 B:2", None),
        ("0:-1", None),
    ],
)
def test_batch_schedule(text: str, meaning: object) -> None:
    assert batch_schedule(text) == meaning


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("1", (1.0, 0.0, 0.0)),
        ("90,10", (0.9, 0.1, 0.0)),
        ("1/1", (0.5, 0.5, 0.0)),
        ("", None),
        ("a,b", None),
        ("0,0,0", None),
        ("1,-1,1", None),
        ("inf", None),
        ("nan", None),
        ("1,1,1,1", None),
    ],
)
def test_split_shares(text: str, shares: tuple[float, ...] | None) -> None:
    found = split_shares(text)
    assert found == (None if shares is None else pytest.approx(shares))
