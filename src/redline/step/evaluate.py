"""The mean loss over held-out samples. No gradient, no dropout, no state is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from redline.comm import Group
from redline.data import Microbatch
from redline.model import EngineFp8, Fp8Gemms, Transformer
from redline.step.forward import microbatch_loss, wide_dtype


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss in nats a token over `num_tokens` tokens; NaN where no token counted."""

    loss: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: Transformer,
    microbatches: Iterable[Microbatch],
    device: torch.device,
    dp: Group | None = None,
    fp8: Fp8Gemms | EngineFp8 | None = None,
) -> Evaluation:
    """Token-weighted mean over all `microbatches`: it does not depend on how they are cut.

    Args:
        dp: the ranks that see other microbatches, whose mean it is then too.
        fp8: of the model; its scales are used and learn nothing from this.
    """
    if fp8 is not None:
        fp8.prepare()
    total = torch.zeros((), dtype=torch.float64, device=device)
    one = torch.ones((), dtype=wide_dtype(model), device=device)
    num_tokens = 0
    for batch in microbatches:
        num_tokens += int(batch.loss_mask_BS.count_nonzero())
        total += microbatch_loss(model, batch.to(device, non_blocking=True), one, None)
    if fp8 is not None:
        fp8.forget()
    if dp is not None and dp.handle is not None:
        both = torch.stack((total, total.new_tensor(float(num_tokens))))
        dp.sends("all-reduce of the loss")
        dist.all_reduce(both, group=dp.handle)
        total, num_tokens = both[0], int(both[1].item())
    return Evaluation(total.item() / num_tokens if num_tokens else math.nan, num_tokens)
