"""The tensors of a real forward and backward, counted: what memory predictions are held against."""

from functools import partial

import torch
from live_memory import LiveMemory

from redline.attention import MaskSpec, flash_attention, fused_softmax, unfused_attention
from redline.model import DropoutState, Transformer, dropout_keys, fused_ops
from redline.optim.flat import FlatBuffers

BACKENDS = {"unfused": unfused_attention, "flash": flash_attention}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


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
    tokens = torch.randint(0, shape.vocab_size, (B, S), generator=generator)
    positions, weights = torch.arange(S).repeat(B, 1), torch.ones(B, S)
    batch = (tokens, tokens.clone(), positions, weights)
    dropout = None
    if drop:
        keys = dropout_keys(0, shape.num_layers, "cpu")
        dropout = DropoutState(keys=keys, iteration=torch.tensor(1), sample_index_B=torch.arange(B))
    mask = MaskSpec(segment_ids_BS=(positions // 40).int() if run.segments else None)
    known = [*model.parameters(), *(param.main_grad for param in model.parameters()), *batch]
    with LiveMemory(known) as live:
        hidden = model(tokens, positions, mask, dropout)
        saved = live.now
        loss = model.loss(hidden, batch[1], weights)
        del hidden
        loss.backward()
    inputs = sum(tensor.nbytes for tensor in batch)
    return saved + inputs, live.peak + inputs
