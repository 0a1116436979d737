"""The tensor-parallel axis of a run: who shares the model, and what joins their collectives to GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from redline.choice import Choice
from redline.comm import Group, Groups
from redline.comm.linked_gemm import Chunked, LinkedGemm, Plain
from redline.comm.measure import Sites, Timing, time_gathers, time_scatters
from redline.comm.pushed import Pushed
from redline.comm.symmetric import SymmetricMemory, open_area, reserve
from redline.config import OverlapConfig, RunConfig
from redline.errors import ConfigError
from redline.formulas.tp_traffic import TURNS, pushed_turn_bytes, symmetric_workspace_bytes
from redline.model import TensorParallel
from redline.model.fp8_linked import random_product
from redline.plan import Plan

CHUNKS = 2  # where nobody says, and nothing can be measured
CANDIDATES = (2, 4)
# By how much a method that cuts a GEMM into pieces must beat one after the other: it is measured with the
# host ahead, and launches more. On two H200s pieces 8% faster so made an 8B model's steps in fp8 8% longer.
WORTH_IT = 0.1
Timer = Callable[[Sequence[LinkedGemm], Sites, Group], list[Timing]]
Sizes = dict[str, tuple[int, int]]  # K and N of each product of a layer, by the name of its site


def tensor_parallel(
    config: RunConfig, plan: Plan, groups: Groups, dtype: torch.dtype, device: torch.device
) -> tuple[TensorParallel, tuple[Choice, ...]]:
    """The axis as the model uses it, and the record of it; one rank has none.

    Raises: ConfigError when a method asked for by name cannot run here.
    """
    group, sequence, overlap = groups.tp, config.parallel.sequence_parallel, config.overlap
    if group.size == 1:
        return TensorParallel(), ()
    what = "matrices and sequence" if sequence else "matrices"
    choices = [Choice("tensor-parallel", str(group.size), str(group.size), f"the ranks share {what}")]
    if not overlap.tp_comm_overlap:
        return TensorParallel(group=group, sequence=sequence), tuple(choices)
    candidates, refusal = _candidates(overlap, plan, group)
    rank = plan.shape.of_rank(group.size)
    rows = plan.microbatch.tokens // group.size
    unmeasured = "nothing is measured on a CPU" if device.type != "cuda" else None
    product = partial(random_product, dtype=dtype, device=device)

    def choose(name: str, wanted: bool, timer: Timer, bulk: bool, sizes: Sizes) -> LinkedGemm:
        in_fp8 = {part: sizes[part] for part in sizes if plan.fp8 is not None and _has(plan.fp8.sites, part)}
        timed = tuple((in_fp8 or sizes).values())

        def time(each: Sequence[LinkedGemm]) -> list[Timing]:
            sites = Sites(rows, timed, dtype, bulk, product if in_fp8 else None, device)
            return timer(each, sites, group)

        provider, ran, why = _choose(candidates if wanted else [], unmeasured or time)
        asked = overlap.tp_comm_overlap_method
        choices.append(Choice(f"tp-comm-overlap, {name}", asked, ran, f"{why}{refusal}" if wanted else why))
        return provider

    columns = {"qkv": (rank.hidden, rank.q_size + 2 * rank.kv_size), "fc1": (rank.hidden, rank.fc1_size)}
    gather = choose("gather", overlap.tp_comm_overlap_ag, time_gathers, overlap.tp_comm_bulk_wgrad, columns)
    summed = {"proj": (rank.q_size, rank.hidden), "fc2": (rank.ffn, rank.hidden)}
    scatter = choose("scatter", overlap.tp_comm_overlap_rs, time_scatters, overlap.tp_comm_bulk_dgrad, summed)
    choices.append(_bulk(overlap))
    tp = TensorParallel(
        group=group,
        sequence=sequence,
        gather_gemm=gather,
        gemm_scatter=scatter,
        bulk_wgrad=overlap.tp_comm_bulk_wgrad,
        bulk_dgrad=overlap.tp_comm_bulk_dgrad,
        scatter_dgrad=overlap.tp_comm_overlap_rs_dgrad,
    )
    return tp, tuple(choices)


def _candidates(overlap: OverlapConfig, plan: Plan, group: Group) -> tuple[list[LinkedGemm], str]:
    """What may run, and why what needs symmetric memory may not."""
    method, chunks = overlap.tp_comm_overlap_method, overlap.tp_comm_overlap_chunks
    if method == "plain":
        return [Plain()], ""
    if method == "chunked":
        return [Chunked(chunks or CHUNKS)], ""
    makers = {"pushed": _pushed, "symmetric": _symmetric}
    if method in makers:
        made = makers[method](plan, group)
        if isinstance(made, str):
            raise ConfigError(
                f"--tp-comm-overlap-method {method} cannot run here.",
                f"{made}.",
                "use --tp-comm-overlap-method auto, or chunked, which runs anywhere.",
            )
        return [made], ""
    found: list[LinkedGemm] = [Chunked(number) for number in ((chunks,) if chunks else CANDIDATES)]
    found.append(Plain())
    if plan.fp8 is not None:
        return found, f"; not {' or '.join(makers)}: they multiply 16 bits alone"
    refusals = []
    for name, make in makers.items():
        made = make(plan, group)
        if isinstance(made, str):
            refusals.append(f"; not {name}: {made}")
        else:
            found.append(made)
    return found, "".join(refusals)


def _symmetric(plan: Plan, group: Group) -> LinkedGemm | str:
    """PyTorch's joined GEMMs with their buffer, or why not."""
    reason = reserve(group, symmetric_workspace_bytes(plan.shape, plan.microbatch, group.size))
    return SymmetricMemory() if reason is None else reason


def _pushed(plan: Plan, group: Group) -> LinkedGemm | str:
    """Copies into each other's memory, with the area for them, or why not."""
    num_bytes = pushed_turn_bytes(plan.shape, plan.microbatch)
    area = open_area(group, TURNS * num_bytes)
    return area if isinstance(area, str) else Pushed(area, num_bytes)


def _has(sites: Sequence[str], part: str) -> bool:
    """Whether some layer has this part among the sites."""
    return any(site.endswith(f".{part}") for site in sites)


def _choose(
    candidates: Sequence[LinkedGemm], time: Callable[[Sequence[LinkedGemm]], list[Timing]] | str
) -> tuple[LinkedGemm, str, str]:
    """The provider, its name and why it. `time` is a reason where nothing is measured."""
    if not candidates:
        return Plain(), "plain", "switched off"
    first = candidates[0]
    if len(candidates) == 1:
        return first, first.name, "asked for by name"
    if isinstance(time, str):
        return first, first.name, time
    timings = time(candidates)
    times = ", ".join(f"{each.provider.name} {each.ms:.2f} ms" for each in timings)
    plain_ms = next((each.ms for each in timings if isinstance(each.provider, Plain)), timings[-1].ms)
    worth = [each for each in timings if each.ms <= (1.0 - WORTH_IT) * plain_ms or not _in_pieces(each)]
    taken = (worth or timings)[0].provider
    left = "" if taken is timings[0].provider else f", which pieces must beat by {WORTH_IT:.0%},"
    return taken, taken.name, f"the fastest{left} of {times}"


def _in_pieces(timing: Timing) -> bool:
    """Whether the provider launches its GEMM and its collective several times."""
    return not isinstance(timing.provider, Plain | Pushed)


def _bulk(overlap: OverlapConfig) -> Choice:
    """How the collectives of a column GEMM's backward run."""
    behind = {"input gathered behind dgrad": overlap.tp_comm_bulk_wgrad}
    if overlap.tp_comm_overlap_rs_dgrad:
        behind["gradient scattered with dgrad"] = True
    else:
        behind["gradient scattered behind wgrad"] = overlap.tp_comm_bulk_dgrad
    ran = "; ".join(what for what, on in behind.items() if on)
    why = "the GEMM of one gradient hides the other's" if ran else "switched off"
    return Choice("tp-comm-overlap, backward", "as asked", ran or "in the open", why)
