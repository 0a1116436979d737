"""The tensors of a real forward and backward, counted: what memory predictions are held against."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from live_memory import LiveMemory
from torch.utils._python_dispatch import _disable_current_modes

from redline.attention import MaskSpec, flash_attention, fused_softmax, unfused_attention
from redline.kernels import fp8
from redline.kernels.fp8 import reference
from redline.model import DropoutState, Fp8Gemms, Transformer, dropout_keys, fused_ops
from redline.optim.flat import FlatBuffers
from redline.plan.fp8 import gemm_sites
from redline.precision import Fp8Spec, Fp8State

BACKENDS = {"unfused": unfused_attention, "flash": flash_attention}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@contextmanager
def gemms_without_scratch():
    """A GEMM in fp8 holds its result alone, as on a GPU; its twin widens both operands."""

    def gemm(a, b, a_inverse, b_inverse, dtype, fast):
        out = a.new_empty((len(a), len(b)), dtype=dtype)
        with _disable_current_modes():
            out.copy_(reference.gemm(a, b, a_inverse, b_inverse, dtype))
        return out

    def add_wgrad(main_grad, dyt, xt, dy_inverse, x_inverse, overwrite):
        if overwrite:
            with _disable_current_modes():
                main_grad.copy_(reference.gemm(dyt, xt, dy_inverse, x_inverse, main_grad.dtype))
        else:
            main_grad.add_(gemm(dyt, xt, dy_inverse, x_inverse, main_grad.dtype, False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "gemm", gemm)
        patch.setattr(fp8, "add_wgrad", add_wgrad)
        yield


def put_into_fp8(model, run):
    """Every site, in the middle of a run: scales are known, and weight gradients add up if they do.

    Returns the casts of the weights, which are there all the time.
    """
    names = [name for name, _, _ in gemm_sites(model.shape)]
    state = Fp8State(names, Fp8Spec(history_len=4), "cpu", kernels=True)
    output = run.keeps_attention_output
    gemms = Fp8Gemms(model, state, fused=run.fused, copies=run.fp8_copies, keeps_output=output)
    state.steps = 1
    gemms.begin_step()
    for gemm in gemms.gemms.values():
        gemm.fresh = not run.accumulates
    return [cast for gemm in gemms.gemms.values() for cast in gemm.casts]


def measure(shape, run, *, drop=False):
    """(bytes saved by the layers and final norm, peak of forward and backward), without parameters."""
    dtype = DTYPES[run.dtype]
    attention = BACKENDS[run.attention]
    if run.attention == "unfused" and "masked_softmax" in run.fused:
        attention = partial(unfused_attention, softmax=fused_softmax)
    model = Transformer(
        shape, attention=attention, dtype=dtype, ops=fused_ops(run.fused), recompute=run.recompute
    )
    wide = torch.promote_types(dtype, torch.float32)
    FlatBuffers(model.named_parameters(), main_dtype=wide, grad_dtype=wide, device="cpu")
    B, S = run.micro_batch_size, run.seq_length
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(
                0.02 * torch.randn(param.shape, generator=generator) if param.dim() > 1 else torch.ones(())
            )
    casts = put_into_fp8(model, run) if run.fp8 else []
    tokens = torch.randint(0, shape.vocab_size, (B, S), generator=generator)
    positions, weights = torch.arange(S).repeat(B, 1), torch.ones(B, S)
    batch = (tokens, tokens.clone(), positions, weights)
    dropout = None
    if drop:
        keys = dropout_keys(0, shape.num_layers, "cpu")
        dropout = DropoutState(keys=keys, iteration=torch.tensor(1), sample_index_B=torch.arange(B))
    mask = MaskSpec(segment_ids_BS=(positions // 40).int() if run.segments else None)
    known = [*model.parameters(), *(param.main_grad for param in model.parameters()), *batch, *casts]
    with gemms_without_scratch(), LiveMemory(known) as live:
        hidden = model(tokens, positions, mask, dropout)
        saved = live.now
        loss = model.loss(hidden, batch[1], weights)
        del hidden
        loss.backward()
    inputs = sum(tensor.nbytes for tensor in batch)
    return saved + inputs, live.peak + inputs
