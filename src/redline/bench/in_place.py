"""Attention inside a whole step beside the same attention alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redline.attention import select_backend
from redline.attention.timing import document_lengths, measure
from redline.bench.device import clocks, kernel_times
from redline.build import attention_request
from redline.formulas.flops import attention_pass_flops
from redline.formulas.recompute import NOTHING
from redline.ledger.kinds import kernel_kind
from redline.run import OpenRun
from redline.step import StepOutcome


def attention_in_place(run: OpenRun, step: Callable[[], StepOutcome]) -> dict[str, Any] | None:
    """Attention's kernels in one more step, a layer and microbatch at a time, against alone.

    `share` is the time alone over that in place: below 1 by what the model's clocks and caches cost. None
    where the two are not the same work (packed documents, windows, recomputation, several ranks), where no
    kernel is attention's alone (`unfused`), or without a GPU.
    """
    request = attention_request(run.config, run.plan, run.device)
    ran = next(choice.ran for choice in run.choices if choice.what == "attention-backend")
    whole = not (request.packed or request.segments or request.window)
    once = run.plan.microbatch.recompute == NOTHING and run.groups.world.size == 1
    if run.device.type != "cuda" or ran == "unfused" or not (whole and once):
        return None
    parts = run.plan.shape.num_layers * run.plan.batch.num_microbatches(run.state.consumed_samples)
    times = [each for each in kernel_times(step) if kernel_kind(each.name) == "attention"]
    after = clocks("cuda")
    in_place_s = sum(each.seconds for each in times) / parts
    timing = measure({ran: select_backend(ran, request)[0]}, request)[ran]
    if timing.failed or not in_place_s:
        return {"backend": ran, "error": timing.failed or "no kernel of a step is known as attention's"}
    flops = request.batch * sum(
        attention_pass_flops(document_lengths(request), request.num_heads, request.head_dim)
    )
    return {
        "backend": ran,
        "in_place_s": in_place_s,
        "alone_s": timing.total_s,
        "alone_forward_s": timing.forward_s,
        "alone_backward_s": timing.backward_s,
        "in_place_flops_per_s": flops / in_place_s,
        "alone_flops_per_s": flops / timing.total_s,
        "share": timing.total_s / in_place_s,
        "kernels": [each.as_dict() for each in times],
        "clocks_in_place": after,
        "clocks_alone": clocks("cuda"),
    }
