"""Traces of another trainer, as it really writes them: models of `transformers` under PyTorch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from redline.ledger import Reference, StepAccount
from redline.ledger.take import take_account
from redline.ledger.trace import read_trace

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

B, S, LAYERS, HEADS, HEAD_DIM = 2, 64, 2, 4, 16
SIZES: dict[str, Any] = {
    "gpt2": {"n_layer": LAYERS, "n_embd": 64, "n_head": HEADS, "vocab_size": 500, "n_positions": S},
    "llama": {
        "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 176,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": 500,
        "max_position_embeddings": S,
    },
}  # fmt: skip


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES[kind]))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES[kind]))


def accounted(kind: str, folder: Path) -> tuple[StepAccount, float]:
    """The account of two profiled steps of such a trainer, and the FLOPs that PyTorch counts in one."""
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 500, (B, S))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    path = folder / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            step()
            profiler.step()
    with FlopCounterMode(display=False) as counter:
        step()
    account = take_account(read_trace(path), Reference(dtype="fp32", peak_flops_per_s=1e15))
    return account, float(counter.get_total_flops())


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, *accounted(request.param, tmp_path_factory.mktemp(request.param))


def test_every_instant_has_one_owner(found: Any) -> None:
    _, account, _ = found
    assert len(account.steps) == 2
    assert account.ideal_ms + sum(loss.ms for loss in account.losses) == pytest.approx(account.wall_ms)
    causes = {loss.key for loss in account.losses}
    assert {"gemm", "attention", "loss", "optimizer", "other"} <= causes
    assert not causes & {"recompute", "tp", "dp", "collective", "data"}


def test_flops_of_the_step_are_those_that_pytorch_counts(found: Any) -> None:
    """GPT-2's attention with dropout is plain products here; Llama's is fused, which PyTorch's counter leaves
    out on a CPU and the ledger takes for causal: half."""
    kind, account, counted = found
    attention = 3 * 2 * 2 * B * HEADS * S * S * HEAD_DIM * LAYERS  # forward, and twice that backward
    linear = sum(row.flops or 0 for row in account.operators if row.role)
    assert linear == counted - (attention if kind == "gpt2" else 0)
    assert account.reference.attention_flops == attention / (1 if kind == "gpt2" else 2)
    assert account.reference.model_flops == linear + account.reference.attention_flops


def test_a_linear_layer_has_three_products_as_large(found: Any) -> None:
    _, account, _ = found
    by_role = {
        role: sum(row.flops for row in account.operators if row.role == role and row.flops)
        for role in ("fprop", "dgrad", "wgrad")
    }
    assert by_role["fprop"] == pytest.approx(by_role["wgrad"])
    assert by_role["dgrad"] == pytest.approx(by_role["fprop"])
    assert {row.phase for row in account.operators if row.role == "wgrad"} == {"backward"}


def test_the_norm_of_the_gradients_belongs_to_the_optimizer(found: Any) -> None:
    kind, account, _ = found
    norms = [row for row in account.operators if row.name == "aten::linalg_vector_norm"]
    assert norms and all(row.kind == "optimizer" for row in norms), kind
