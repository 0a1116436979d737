"""The plan: what follows from a config, once for every kind of option that it reads."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from redline.config import RunConfig, parse_args, with_values
from redline.errors import ConfigError
from redline.formulas.flops import flops_per_token
from redline.hardware import Hardware, hardware_named
from redline.plan import Reached, make_plan

CPU = Hardware(name="a CPU", kind="cpu", memory_bytes=8 << 30)
H200 = hardware_named("h200")
V100 = hardware_named("v100")
VOCAB = 1000


def plan(hardware=CPU, world_size=1, **values):
    base = {"train_iters": 100, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 64}
    return make_plan(with_values(RunConfig(), base | values), hardware, VOCAB, world_size)


def test_a_plan_is_a_pure_value():
    assert plan() == plan() and plan() != plan(seed=7, hidden_size=96)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("tp-divides-ffn", {"ffn_hidden_size": 90}),
        ("tp-divides-vocabulary", {"padded_vocab_size": 1002}),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(rule, values):
    with pytest.raises(ConfigError, match=f"rule: {rule}"):
        plan(world_size=4, tensor_model_parallel_size=4, num_attention_heads=4, hidden_size=64, **values)
    plan(world_size=4, tensor_model_parallel_size=4, num_attention_heads=4, hidden_size=64)


def test_batches_and_schedules_are_in_samples():
    found = plan(
        lr_warmup_iters=10, lr_decay_iters=50, min_lr=1e-5, lr_wsd_decay_iters=5, lr_decay_style="WSD"
    )
    assert found.batch.total_samples == 800 and found.tokens_per_step(0) == 512
    main = found.schedule.main
    assert (main.warmup, main.decay, main.wsd_decay) == (80, 400, 40)
    assert found.schedule.lr(0) == 0.0 and found.schedule.lr(80) == main.max_lr


def test_the_final_decay_takes_the_last_steps_whatever_their_size():
    """A batch that has grown: ten steps at the end are not the samples of the first ten."""
    found = plan(
        global_batch_size=16, rampup_batch_size=(2, 2, 60), lr_decay_style="WSD", lr_wsd_decay_iters=10,
        train_iters=40,
    )  # fmt: skip
    batch, main = found.batch, found.schedule.main
    assert main.wsd_decay == batch.samples_at(40) - batch.samples_at(30) == 160
    assert found.schedule.lr(batch.samples_at(30)) == main.max_lr > found.schedule.lr(batch.samples_at(31))
    with pytest.raises(ConfigError, match="wsd-length"):
        plan(lr_decay_style="WSD", lr_wsd_decay_iters=20, train_iters=None, train_samples=80)


def test_a_resumed_run_with_other_batches_trains_on_what_is_left():
    reached = Reached(5, 40)
    config = with_values(RunConfig(), {"micro_batch_size": 2, "global_batch_size": 16, "train_samples": 80})
    batch = make_plan(config, CPU, VOCAB, reached=reached).batch
    assert (batch.total_iterations, batch.total_samples) == (7, 72)
    same = make_plan(with_values(config, {"global_batch_size": 8}), CPU, VOCAB, reached=reached).batch
    assert same == make_plan(with_values(config, {"global_batch_size": 8}), CPU, VOCAB).batch


def test_lengths_stated_in_samples():
    found = plan(train_iters=None, train_samples=805, lr_warmup_samples=16, lr_decay_samples=400)
    assert found.batch.total_iterations == 100
    assert (found.schedule.main.warmup, found.schedule.main.decay) == (16, 400)
    assert plan(train_iters=None, train_samples=805).schedule.main.decay == 805


def test_warmup_as_a_fraction_of_the_decay():
    assert plan(lr_warmup_fraction=0.1).schedule.main.warmup == pytest.approx(80)
    assert plan(lr_warmup_fraction=0.1, lr_decay_iters=50).schedule.main.warmup == pytest.approx(40)


def test_iterations_of_a_ramp_count_what_they_consume():
    found = plan(rampup_batch_size=(2, 2, 60), lr_warmup_iters=10)
    assert found.schedule.main.warmup == found.batch.samples_at(10) == 20
    assert found.schedule.main.decay == found.batch.total_samples < 800


def test_batch_sizes_by_tokens_seen():
    found = plan(global_batch_size=None, step_batch_size_schedule="0:2 1K:4")
    assert [found.batch.global_batch_size(samples) for samples in (0, 14, 16, 99)] == [2, 2, 4, 4]


def test_weight_decay_and_decoupled_rates():
    found = plan(weight_decay=0.3)
    assert found.schedule.weight_decay(0) == found.schedule.weight_decay(800) == 0.3
    ends = {"start_weight_decay": 0.0, "end_weight_decay": 0.2, "weight_decay_incr_style": "linear"}
    assert plan(**ends).schedule.weight_decay(400) == pytest.approx(0.1)
    both = plan(decoupled_lr=1e-5, min_lr=1e-4)
    assert both.schedule.decoupled is not None and both.schedule.decoupled.max_lr == 1e-5
    assert both.schedule.decoupled.min_lr == 1e-5  # never above its own peak


@pytest.mark.parametrize(
    ("hardware", "values", "name"),
    [
        (CPU, {}, "fp32"),
        (H200, {}, "bf16"),
        (V100, {}, "fp16"),
        (CPU, {"bf16": True}, "bf16"),
        (H200, {"fp32": True}, "fp32"),
        (CPU, {"fp64": True}, "fp64"),
    ],
)
def test_precision(hardware, values, name):
    found = plan(hardware, **values)
    (choice,) = found.choices
    assert found.precision == found.dtypes.param == choice.ran == name
    assert choice.asked == (name if values else "auto") and choice.why
    assert found.dtypes.main == found.dtypes.grad == ("fp64" if name == "fp64" else "fp32")


def test_bf16_gradients():
    assert plan(H200, bf16=True, grad_reduce_in_bf16=True).dtypes.grad == "bf16"


def test_evaluation_counts_samples():
    found = plan(eval_iters=5, eval_interval=30).evaluation
    assert found.samples == 5 * 8
    assert found.num_microbatches == 4
    at_the_end = plan(eval_iters=5).evaluation
    assert at_the_end.interval is None and at_the_end.samples == 40
    assert plan(eval_iters=0).evaluation.samples == 0


def test_memory_follows_what_build_chooses():
    asked = plan(H200)
    assert asked.microbatch.attention == "local"  # only Redline's own kernel draws the run's dropout
    dense = plan(H200, attention_dropout=0.0)
    assert dense.microbatch.attention == "flash"
    unfused = dense.with_implementation("unfused", dense.microbatch.fused)
    assert unfused.memory.total > dense.memory.total and unfused.shape == dense.shape
    assert plan(H200, attention_dropout=0.0, fp32=True).microbatch.attention == "unfused"
    assert plan(attention_dropout=0.0, attention_backend="unfused").microbatch.attention == "unfused"


def test_flops_in_both_conventions():
    found = plan()
    assert set(found.flops) == {"causal-half", "full"}
    assert found.flops["full"] == flops_per_token(found.shape, 64, "full")


def test_ranks():
    found = plan(world_size=4)
    assert found.grid.dp == 4 and found.batch.num_microbatches(0) == 1
    assert plan(world_size=4, global_batch_size=None).batch.final_batch_size == 8
    with pytest.raises(ConfigError, match="batch-of-ranks"):
        plan(world_size=3)


@pytest.mark.parametrize(
    ("instances", "states", "gradients"),
    [
        (1, "sharded", "reduce-scatter: sent during the backward pass"),
        (
            2,
            "sharded",
            "reduce-scatter, then all-reduce across instances: "
            "sent during the backward pass, across once summed inside",
        ),
        (4, "replicated", "all-reduce: sent during the backward pass"),
    ],
)
def test_instances_say_what_they_send_and_when(instances, states, gradients):
    """Sums across instances go during backward too; instances of one rank share nothing."""
    made = plan(
        world_size=4,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=instances,
        global_batch_size=4,
        micro_batch_size=1,
    )
    found = {choice.what: choice for choice in made.data_parallel.choices}
    assert found["optimizer-states"].ran == states
    grads = found["gradients"]
    assert f"{grads.ran}: {grads.why.split(' elements, ')[1]}" == gradients


def test_a_run_has_a_length():
    with pytest.raises(ConfigError, match="length-stated"):
        plan(train_iters=None)


def test_presets_plan():
    config = parse_args(["--preset", "llama3-8b", "--train-iters", "5", "--mock-data"]).config
    found = make_plan(config, H200, 128256)
    assert found.parameters.total == 8_030_261_248
    assert found.memory.reserved > H200.memory_bytes  # fp32 everything: 18 bytes a parameter
    smaller = make_plan(with_values(config, {"num_layers": 8}), H200, 128256)
    assert smaller.memory.reserved < H200.memory_bytes


def test_plans_are_frozen():
    found = plan()
    assert isinstance(found.flops, MappingProxyType)
    with pytest.raises(AttributeError):
        found.precision = "bf16"
    assert replace(found, seq_length=1) != found
