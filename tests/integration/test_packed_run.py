"""Packed training is training the documents one by one; it resumes bit for bit and counts real tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.attention import Request, select_backend
from redline.build import compile
from redline.data import DataSpec, IndexedWriter, Microbatch, open_data
from redline.formulas.flops import flops_per_token
from redline.formulas.shape import ModelShape
from redline.model import Transformer, init_parameters
from redline.step.forward import microbatch_loss

from .conftest import TINY
from .test_resume import weights

SIZES = {
    "num_layers": 2, "hidden": 24, "ffn": 40, "num_heads": 4, "num_groups": 2, "head_dim": 8,
    "vocab_size": 53, "padded_vocab_size": 64, "max_positions": 32, "init_std": 0.2,
    "embedding_init_std": 0.5,
}  # fmt: skip
SHAPES = {
    "learned positions": {"num_groups": 4},
    "rope": {
        "position": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "qk_norm": "norm",
        "softmax_type": "learnable",
        "bias_linear": False,
        "tied": False,
    },
}


def documents(count: int = 12, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 53, 2 + random.integers(0, 24)).tolist() for _ in range(count)]


def write(prefix: Path, texts: list[list[int]]) -> str:
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for text in texts:
            writer.add_document(text)
    return str(prefix)


def model_of(kind: str) -> Transformer:
    shape = ModelShape(**{**SIZES, **SHAPES[kind]})
    request = Request(
        device_type="cpu",
        dtype=torch.float64,
        head_dim=8,
        num_heads=4,
        num_groups=shape.num_groups,
        packed=True,
        sinks=shape.softmax_type != "vanilla",
    )
    attention, _ = select_backend("auto", request)
    model = Transformer(shape, attention=attention, dtype=torch.float64)
    model.to_empty(device="cpu")
    init_parameters(model, shape, seed=7)
    return model


def alone(text: list[int]) -> Microbatch:
    """A document as a microbatch of its own."""
    tokens = torch.tensor([text])
    return Microbatch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.ones(1, len(text) - 1),
        torch.arange(len(text) - 1)[None],
        None,
        torch.zeros(1, dtype=torch.int64),
    )


def loss_and_gradients(model: Transformer, batches: list[Microbatch]) -> list[Tensor]:
    model.zero_grad()
    loss = sum(microbatch_loss(model, batch, torch.ones((), dtype=torch.float64), None) for batch in batches)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(
    kind: str, micro_batch_size: int, tmp_path: Path
) -> None:
    """In float64 to 1e-12 of the largest number: attention, rotary and learned positions begin anew."""
    texts = documents()
    spec = DataSpec(
        seq_length=24,
        vocab_size=53,
        train_samples=1,
        train_data_path=(write(tmp_path / "a", texts),),
        packing=True,
    )
    source = open_data(spec).train
    model = model_of(kind)
    size = len(source) - len(source) % micro_batch_size
    packed = [source.batch(start, micro_batch_size) for start in range(0, size, micro_batch_size)]
    packed += [source.batch(number, 1) for number in range(size, len(source))]
    found, wanted = loss_and_gradients(model, packed), loss_and_gradients(model, [alone(t) for t in texts])
    assert len(source) < len(texts), "several documents to a sample"
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(
    "modules", [pytest.param("", marks=pytest.mark.long), "core_attn layernorm activation"]
)
def test_twenty_packings_compile_once(modules: str, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B067: whatever is packed, boundaries are of one size and the longest length is one number.

    With modules that compiled blocks drop, the bits of eager blocks that keep them.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    flags = "--packing --train-iters 10 --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1"
    drop = f"--recompute-activations --recompute-modules {modules}" if modules else ""
    eager, compiled = train("eager", flags), train("compiled", f"{flags} {drop} --use-torch-compile")
    assert compiled.losses == eager.losses and compiled.valid_losses == eager.valid_losses
    assert compiled.summary["compiled"]["graphs"] == 2, "one to train on 20 microbatches, one to evaluate"


def test_recomputed_packed_blocks_are_the_same(train: Any) -> None:
    """What a recomputed block needs of the packing - starts, angles - it is given again; to the last bit."""
    flags = "--packing --hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type rope"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    modules = "--recompute-granularity selective --recompute-modules core_attn layernorm activation"
    kept = train("kept", flags)
    wanted = weights(kept)
    for name, how in (("again", full), ("modules", modules)):
        run = train(name, f"{flags} {how}")
        saved = weights(run)
        assert run.losses == kept.losses
        assert all(torch.equal(saved[key], wanted[key]) for key in wanted), name


@pytest.fixture
def blend(tmp_path: Path) -> str:
    paths = [write(tmp_path / name, documents(60, seed)) for seed, name in enumerate(("a", "b"))]
    return f"--data-path 0.7 {paths[0]} 0.3 {paths[1]} --split 80,10,10"


@pytest.mark.parametrize(
    "how", ["--packing", "--dataloader-inter-document-masking", "--packing --bf16 --fp8-format hybrid"]
)
def test_a_packed_run_resumes_bit_for_bit(train: Any, blend: str, how: str) -> None:
    """A blend, evaluated on packed samples too; cut at step 3."""
    base = TINY.replace("--mock-data", blend).replace("--vocab-size 101", "--vocab-size 64")
    flags = f"{how} --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 2"
    whole = train("whole", flags, base)
    cut = train("cut", f"{flags} --exit-interval 3", base)
    resumed = train("cut", f"{flags} --load {cut.folder}", base)
    assert resumed.losses == whole.losses and whole.valid_losses
    saved, wanted = weights(resumed), weights(whole)
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


def test_throughput_and_mfu_count_real_tokens(train: Any, blend: str) -> None:
    """By hand from the microbatches: padding is no token, attention goes by each document's length."""
    base = TINY.replace("--mock-data", blend).replace("--vocab-size 101", "--vocab-size 64")
    run = train("run", "--packing --train-iters 1 --eval-iters 0 --seq-length 32", base)
    record = run.records()[0]
    places = 4 * 32
    tokens = record["token_efficiency"] * places
    assert tokens == pytest.approx(round(tokens)) and 0.5 * places < tokens <= places
    assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(tokens)
    assert run.summary["consumed_tokens"] == round(tokens), "every token that is none of padding has a label"
    per_token = record["flops_per_s"] / record["tokens_per_s"]
    shape = ModelShape(
        **{**SIZES, "hidden": 32, "ffn": 48, "num_groups": 4, "vocab_size": 64, "max_positions": 32}
    )
    shortest, longest = (flops_per_token(shape, length).total for length in (1, 25))
    assert shortest < per_token < longest, "documents are shorter than the sample"
