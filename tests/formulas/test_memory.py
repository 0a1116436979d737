"""Memory: bytes a parameter, and predictions against the tensors that are really alive in a step."""

from dataclasses import replace

import pytest
from formula_shapes import LLAMA3_8B, gpt, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_step import measure

from redline.config import parse_args
from redline.formulas.activations import (
    MicrobatchShape,
    saved_by_embedding,
    saved_by_head,
    saved_by_layer,
    total_bytes,
)
from redline.formulas.memory import activation_table, training_memory
from redline.formulas.params import count_parameters
from redline.formulas.resolve import shape_of
from redline.formulas.state import StateDtypes, bytes_per_parameter, state_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("dp", "each", "gib"), [(1, 18.0, 134.6), (2, 12.0, 89.7), (8, 7.5, 56.1), (64, 6.19, 46.3)]
)
def test_bytes_a_parameter(dp, each, gib):
    """B081: Llama-3 8B in bf16 with fp32 gradients under a sharded Adam."""
    found = bytes_per_parameter(StateDtypes(), dp, distributed_optimizer=True)
    assert round(found, 2) == each
    count = count_parameters(LLAMA3_8B).total
    assert round(count * found / GIB, 1) == gib
    assert sum(state_bytes(count, StateDtypes(), dp, True).values()) == pytest.approx(count * found)


def test_other_storage():
    whole = bytes_per_parameter(StateDtypes(), dp=8)
    assert whole == 18  # nothing is sharded without a distributed optimizer
    assert bytes_per_parameter(StateDtypes(param="fp32")) == 16  # main parameters are the parameters
    assert (
        bytes_per_parameter(
            StateDtypes(param="fp64", main="fp64", grad="fp64", exp_avg="fp64", exp_avg_sq="fp64")
        )
        == 32
    )
    assert bytes_per_parameter(StateDtypes(grad="bf16", exp_avg="bf16", exp_avg_sq="bf16")) == 12


@pytest.mark.parametrize("moments", ["fp32", "fp8"])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_states_in_host_memory(share, moments):
    """What leaves the device is what the host gets; two chunks of room are the price; a CPU keeps all."""
    dtypes = StateDtypes(exp_avg=moments, exp_avg_sq=moments, shards=4)
    run = MicrobatchShape(seq_length=8192, device="cuda", fused=frozenset({"adamw"}))
    here = training_memory(LLAMA3_8B, run, dtypes).fullest
    there = training_memory(LLAMA3_8B, run, replace(dtypes, away=share)).fullest
    each = 12 if moments == "fp32" else 4 + 2 * (1 + 2 / 64)
    host = sum(there.host.values())
    assert host == pytest.approx(share * each * here.state["weights"] / 2 / 4, rel=1e-6)
    stages = there.state["optimizer_stages"]
    assert stages == 2 * round(each * 2**23)
    assert here.total - there.total == host - stages
    one = training_memory(LLAMA3_8B, run, replace(dtypes, away=share, stages=1)).fullest
    assert one.state["optimizer_stages"] == stages // 2
    cpu = replace(run, device="cpu", fused=frozenset())
    same, kept = (
        training_memory(LLAMA3_8B, cpu, each).fullest.state for each in (dtypes, replace(dtypes, away=share))
    )
    assert {name: kept[name] for name in same} == same


def test_lines_add_up():
    """B081: activations, logits and buffers are lines of their own, and reserve stands apart."""
    run = MicrobatchShape(seq_length=8192)
    stage = training_memory(LLAMA3_8B, run, StateDtypes()).fullest
    assert (
        sum(stage.parts.values())
        == stage.total
        == stage.moments[stage.peak_at]
        == max(stage.moments.values())
    )
    assert stage.reserved == stage.total + stage.fragmentation + stage.context
    once_and_by_layer = sum(times * held.num_bytes for times, held in activation_table(LLAMA3_8B, run))
    assert stage.peak_at == "loss" and sum(stage.activations.values()) == once_and_by_layer
    # at the loss: log probabilities and two gradients of them, 12 bytes a token and vocabulary entry; beside
    # them the final norm's input in fp32 and its output twice
    head = 12 * 8192 * 128256 + 8 * 8192 * 4096
    assert stage.workspace["loss"] + stage.activations["head"] == pytest.approx(head, rel=1e-4)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    st.sampled_from(["unfused", "flash", "fused"]),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 3),
)
def test_activations_grow_with_everything(attention, dtype, device, batch):
    shape = replace(gpt(2, 64, 4, 1000), hidden_dropout=0.1, attention_dropout=0.1 * (attention == "unfused"))
    run = MicrobatchShape(
        seq_length=64, micro_batch_size=batch, dtype=dtype, attention=attention, device=device
    )
    total = training_memory(shape, run, StateDtypes()).total
    for more in (
        training_memory(replace(shape, num_layers=3), run, StateDtypes()),
        training_memory(shape, replace(run, micro_batch_size=batch + 1), StateDtypes()),
        training_memory(shape, replace(run, seq_length=65), StateDtypes()),
        training_memory(replace(shape, vocab_size=1010), run, StateDtypes()),
    ):
        assert more.total > total
    assert all(held.num_bytes > 0 for held in saved_by_layer(shape, run))


LLAMA = llama(3, 128, 320, 8, 2, 5000, 16)
GPT = gpt(3, 128, 8, 5000)
SMALL = 64  # a vocabulary so small that the loss is not the peak
FEW_TOKENS = {"vocab_size": SMALL, "padded_vocab_size": SMALL}
GPT_OSS = {"activation": "quick-geglu", "activation_clamp": 7.0, "glu_offset": 1.0}
CASES = {
    "llama": LLAMA,
    "llama, small vocabulary": replace(LLAMA, **FEW_TOKENS),
    "multi-query": replace(LLAMA, **FEW_TOKENS, num_groups=1),
    "qk norm": replace(LLAMA, qk_norm="norm"),
    "l2 norm, no positions": replace(LLAMA, **FEW_TOKENS, qk_norm="l2", position="none"),
    "limited quick-geglu": replace(LLAMA, **GPT_OSS, **FEW_TOKENS),
    "gpt": GPT,
    "gpt, small vocabulary": replace(GPT, **FEW_TOKENS),
    "geglu with biases, shifted": replace(GPT, **FEW_TOKENS, activation="geglu", glu_offset=1.0),
    "squared relu": replace(GPT, **FEW_TOKENS, activation="squared-relu"),
    "hidden dropout": replace(GPT, **FEW_TOKENS, hidden_dropout=0.1),
    "attention dropout": replace(GPT, **FEW_TOKENS, attention_dropout=0.1),
    "sinks": replace(LLAMA, **FEW_TOKENS, softmax_type="learnable"),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_prediction_against_live_tensors(case, attention, dtype, batch):
    """Saved bytes within 1 %: only vectors of the hidden size are left out. The peak within 4 %: it hangs
    on which small tensors happen to be alive beside the large ones."""
    shape = CASES[case]
    if shape.attention_dropout and attention == "flash":
        pytest.skip("this backend takes no dropout")
    if shape.softmax_type != "vanilla" and attention == "flash":
        pytest.skip("PyTorch hands this backend no attention sinks")
    drop = bool(shape.hidden_dropout or shape.attention_dropout)
    run = MicrobatchShape(
        seq_length=96, micro_batch_size=batch, dtype=dtype, attention=attention, device="cpu"
    )
    saved, peak = measure(shape, run, drop=drop)
    final_norm = [held for held in saved_by_head(shape, run) if held.site in ("final_norm", "head")]
    predicted = total_bytes(
        [*saved_by_layer(shape, run) * shape.num_layers, *final_norm, *saved_by_embedding(shape, run)]
    )
    assert predicted == pytest.approx(saved, rel=0.01)
    stage = training_memory(shape, run, StateDtypes(param=dtype)).fullest
    assert stage.total - sum(stage.state.values()) == pytest.approx(peak, rel=0.04)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("dropout", "softmax"), [(0.0, "vanilla"), (0.1, "vanilla"), (0.0, "learnable")])
def test_where_scores_are_the_peak(dropout, softmax, dtype, segments):
    """A long sequence of few channels: the S x S scores decide, to 3 %."""
    shape = replace(gpt(2, 32, 4, SMALL), attention_dropout=dropout, softmax_type=softmax, max_positions=384)
    run = MicrobatchShape(seq_length=384, dtype=dtype, attention="unfused", device="cpu", segments=segments)
    _, peak = measure(shape, run, drop=bool(dropout))
    stage = training_memory(shape, run, StateDtypes(param=dtype)).fullest
    assert stage.peak_at == "attention"
    assert stage.total - sum(stage.state.values()) == pytest.approx(peak, rel=0.03)


# torch.cuda.max_memory_allocated() of a step of the plain implementation, in MiB: H200, torch 2.11.
# (preset, layers, S, B, dtype, attention, vocabulary or None for the preset's) -> peak
H200_PEAKS = {
    ("llama3.2-1b", 4, 8192, 1, "bf16", "flash", None): 24172,
    ("llama3.2-1b", 4, 4096, 3, "bf16", "fused", None): 31883,
    ("llama3.2-1b", 4, 2048, 2, "bf16", "unfused", None): 22539,
    ("llama3.2-1b", 4, 2048, 2, "fp32", "unfused", None): 20853,
    ("gpt2-124m", 12, 1024, 8, "bf16", "flash", None): 9548,
    ("gpt2-124m", 12, 1024, 8, "bf16", "unfused", None): 16467,
    ("qwen3-0.6b", 6, 4096, 2, "bf16", "flash", None): 21827,
    ("llama3-8b", 8, 8192, 2, "bf16", "fused", None): 96827,
    ("llama3.2-1b", 4, 8192, 1, "bf16", "flash", SMALL): 7840,
    ("gpt2-124m", 12, 1024, 8, "bf16", "flash", SMALL): 4331,
    ("llama3.2-1b", 4, 4096, 2, "bf16", "unfused", SMALL): 41659,
}


@pytest.mark.parametrize("case", H200_PEAKS, ids=str)
def test_against_peaks_read_on_an_h200(case):
    """B081: whole peaks with the state, within 0.5 % where the loss (few large tensors) decides, else 3 %."""
    preset, layers, seq_length, batch, dtype, attention, vocab = case
    config = parse_args(["--preset", preset], training=False).config
    shape = shape_of(config.model, seq_length, config.model.vocab_size)
    shape = replace(shape, num_layers=layers, hidden_dropout=0.0, attention_dropout=0.0)
    if vocab is not None:
        shape = replace(shape, vocab_size=vocab, padded_vocab_size=128)
    run = MicrobatchShape(seq_length=seq_length, micro_batch_size=batch, dtype=dtype, attention=attention)
    stage = training_memory(shape, run, StateDtypes(param=dtype)).fullest
    tolerance = 0.005 if stage.peak_at == "loss" else 0.03
    assert stage.total / (1 << 20) == pytest.approx(H200_PEAKS[case], rel=tolerance)
