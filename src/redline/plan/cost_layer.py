"""Seconds of one decoder layer, of the head and of the embedding, on one rank, for one microbatch.

Parts are named by what they are spent on; `Parts` adds and scales them. Nothing here knows of the pipeline or
of data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.formulas.flops import attention_keys_twice
from redline.formulas.time import Rates, attention_s, collective_s, gemm_s, stream_s
from redline.formulas.tp_traffic import AMAX_BYTES
from redline.formulas.traffic import Collective, cast_bytes, layer_bytes, loss_bytes, score_bytes
from redline.plan.cost_setup import Setup, TpOverlap

WGRAD_SLOWER = 1.10  # a weight gradient added to an fp32 output inside its GEMM
WGRAD_APART = 12  # bytes a weight and microbatch when it is written in 16 bits and added afterwards
HIDDEN_IF_UNORDERED = 0.5  # of a collective meant to run under a GEMM, without an order of launch
# Of a collective joined to its GEMM, that stays visible; pieces: docs/performance.md, two GPUs.
TP_OVERLAP_LEFT: dict[TpOverlap, float] = {"": 1.0, "plain": 1.0, "chunked": 0.8, "peers": 0.3}
MEET_SLOWER = 0.12  # of a hidden collective's time that its GEMM loses to it
CP_TAX = 0.10  # ring attention runs pieces and merges them
UNGROUPED = 0.7  # rate of experts' GEMMs one by one, over that of a grouped GEMM
EXPERT_UNEVEN = 1.15  # tokens of the busiest rank over the mean, under a balanced router


@dataclass(slots=True)
class Parts:
    """Seconds by cause; forward and backward apart only where recompute needs to know."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, cause: str, seconds: float) -> None:
        """More seconds of a cause."""
        if seconds:
            self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def merge(self, other: Parts, times: float = 1.0) -> None:
        """Add another's seconds, `times` over."""
        for cause, seconds in other.seconds.items():
            self.add(cause, seconds * times)

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer: forward, backward, what recompute adds, and (forward, backward) kernels it starts."""

    forward: Parts
    backward: Parts
    recompute: Parts

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward.total + self.backward.total + self.recompute.total


@dataclass(frozen=True, slots=True)
class _Gemm:
    """A weight GEMM of a layer on one rank: [tokens, k] x [k, n]."""

    n: float
    k: float
    tokens: float
    copies: int = 1
    slower: float = 1.0


def layer_cost(setup: Setup, rates: Rates, moe: bool) -> LayerCost:
    """One decoder layer with all its microbatch's tokens."""
    forward, backward = Parts(), Parts()
    gemms = [*_attention_gemms(setup), *(_expert_gemms(setup) if moe else _mlp_gemms(setup))]
    _add_gemms(setup, rates, gemms, forward, backward)
    _add_attention(setup, rates, forward, backward)
    _add_elementwise(setup, rates, moe, forward, backward)
    _add_tp(setup, rates, gemms, forward, backward)
    if moe:
        _add_experts(setup, rates, forward, backward)
    return LayerCost(forward, backward, _recompute(setup, rates, forward, gemms))


def head_cost(setup: Setup, rates: Rates) -> Parts:
    """Final norm, vocabulary projection and loss, forward and backward, for the head and each MTP depth."""
    parts, shape, tp = Parts(), setup.shape, setup.grid.tp
    tokens, vocab = setup.tokens, shape.padded_vocab_size / tp
    dtype = setup.dtype
    once = gemm_s(rates, tokens, vocab, shape.hidden, dtype) + gemm_s(
        rates, tokens, shape.hidden, vocab, dtype
    )
    once += gemm_s(rates, vocab, shape.hidden, tokens, dtype, WGRAD_SLOWER)
    parts.add("gemm", once)
    parts.add("loss", stream_s(rates, loss_bytes(setup.fused_loss) * tokens * vocab))
    whole = tokens * shape.hidden * 2
    kinds: tuple[Collective, ...] = ("all_reduce",)
    if setup.sequence_parallel:
        kinds = ("all_gather", "reduce_scatter")
    for kind in kinds:
        parts.add("tp", collective_s(rates, kind, whole, tp))
    parts.add("tp", collective_s(rates, "all_reduce", tokens * 4, tp, times=2))
    every = Parts()
    every.merge(parts, 1 + shape.mtp_num_layers)
    return every


def embedding_cost(setup: Setup, rates: Rates) -> Parts:
    """Look-up and its gradient, and the sum over tp."""
    parts, shape = Parts(), setup.shape
    whole = setup.tokens * shape.hidden * 2
    parts.add("elementwise", stream_s(rates, 4 * whole))
    parts.add("tp", collective_s(rates, "all_reduce", whole, setup.grid.tp))
    return parts


def _attention_gemms(setup: Setup) -> list[_Gemm]:
    shape, tp, T = setup.shape, setup.grid.tp, setup.tokens
    qkv = (shape.q_size + 2 * shape.kv_size) / tp
    return [_Gemm(qkv, shape.hidden, T), _Gemm(shape.hidden, shape.q_size / tp, T)]


def _mlp_gemms(setup: Setup) -> list[_Gemm]:
    shape, tp, T = setup.shape, setup.grid.tp, setup.tokens
    return [_Gemm(shape.fc1_size / tp, shape.hidden, T), _Gemm(shape.hidden, shape.ffn / tp, T)]


def _expert_gemms(setup: Setup) -> list[_Gemm]:
    """Routed experts of a rank with their share of the tokens, and the shared expert."""
    shape, grid = setup.shape, setup.grid
    gates, local = (2 if shape.gated else 1), shape.num_experts / grid.ep
    routed = setup.tokens * shape.moe_topk * EXPERT_UNEVEN / local * grid.etp / grid.tp
    slower = 1.0 if setup.grouped_experts else 1 / UNGROUPED
    wide = shape.moe_ffn / grid.etp
    gemms = [
        _Gemm(gates * wide, shape.hidden, routed, round(local), slower),
        _Gemm(shape.hidden, wide, routed, round(local), slower),
    ]
    if shape.moe_shared_ffn:
        shared = shape.moe_shared_ffn / grid.tp
        gemms.append(_Gemm(gates * shared, shape.hidden, setup.tokens))
        gemms.append(_Gemm(shape.hidden, shared, setup.tokens))
    return gemms


def _add_gemms(setup: Setup, rates: Rates, gemms: list[_Gemm], forward: Parts, backward: Parts) -> None:
    dtype = "fp8" if setup.fp8 else setup.dtype
    block = 1.25 if setup.fp8 == "blockwise" else 1.0
    for gemm in gemms:
        n, k, T = gemm.n, gemm.k, gemm.tokens
        grouped = gemm.copies if setup.grouped_experts and gemm.copies > 1 else 1
        times = gemm.copies / grouped
        slow = gemm.slower * block
        forward.add("gemm", times * gemm_s(rates, T * grouped, n, k, dtype, slow))
        wgrad = gemm_s(rates, n, k * grouped, T, dtype, slow * (WGRAD_SLOWER if setup.wgrad_fusion else 1.0))
        backward.add("gemm", times * (gemm_s(rates, T * grouped, k, n, dtype, slow) + wgrad))
        if not setup.wgrad_fusion:
            backward.add("elementwise", stream_s(rates, WGRAD_APART * n * k * gemm.copies))
        for parts, passes in zip((forward, backward), setup.fp8_weight_passes, strict=True):
            parts.add("elementwise", stream_s(rates, passes * n * k * gemm.copies))


def _attention_core(setup: Setup, rates: Rates) -> tuple[float, float]:
    """(forward, backward) seconds of attention's products."""
    shape, grid = setup.shape, setup.grid
    full = 4 * setup.tokens * setup.seq_length * shape.q_size / grid.tp
    if setup.attention == "unfused":
        scores = setup.tokens * setup.seq_length * shape.num_heads / grid.tp
        read = score_bytes(setup.fused_softmax, shape.attention_dropout > 0)
        rate = rates.peak[setup.dtype] * rates.gemm[setup.dtype] * 0.6
        return tuple(  # type: ignore[return-value]  # a pair
            times * full / rate + stream_s(rates, size * scores)
            for times, size in zip((1, 2), read, strict=True)
        )
    length = setup.seq_length / (2 * grid.cp if grid.cp > 1 else 1)
    tax = 1 + CP_TAX * (grid.cp > 1)
    seen = full / setup.seq_length * attention_keys_twice(shape, setup.seq_length) / 2
    pair = [
        tax * attention_s(rates, seen * times, setup.attention, shape.head_dim, length, backward=times == 2)
        for times in (1, 2)
    ]
    return pair[0], pair[1]


def _add_attention(setup: Setup, rates: Rates, forward: Parts, backward: Parts) -> None:
    """The products, and what of the exchange of keys and values they do not hide."""
    ahead, back = _attention_core(setup, rates)
    forward.add("attention", ahead)
    backward.add("attention", back)
    cp, shape = setup.grid.cp, setup.shape
    if cp == 1:
        return
    pair = 2 * setup.tokens * shape.kv_size / setup.grid.tp * 2
    hop = collective_s(rates, "send", pair, 2, stride=max(setup.grid.tp, 1), times=cp - 1)
    if setup.grid.tp * cp > rates.gpus_per_node:
        hop = collective_s(rates, "send", pair, 2, stride=rates.gpus_per_node, times=cp - 1)
    for parts, core, volume in ((forward, ahead, 1), (backward, back, 2)):
        if setup.ordered:
            parts.add("cp", max(volume * hop - 0.8 * core, 0.1 * volume * hop))
        else:
            parts.add("cp", max(volume * hop - 0.8 * core, HIDDEN_IF_UNORDERED * volume * hop))


def _add_elementwise(setup: Setup, rates: Rates, moe: bool, forward: Parts, backward: Parts) -> None:
    shape, tp, T = setup.shape, setup.grid.tp, setup.tokens
    fused = setup.impl != "local" or setup.compiled
    layer = layer_bytes(shape, fused)
    inner = layer if fused or not setup.fused_activation else layer_bytes(shape, True)
    outside = tp if setup.sequence_parallel else 1
    widen = (shape.moe_topk * shape.moe_ffn + shape.moe_shared_ffn) / shape.ffn if moe else 1.0
    forward.add("elementwise", stream_s(rates, T * layer.outer_forward / outside))
    backward.add("elementwise", stream_s(rates, T * layer.outer_backward / outside))
    forward.add("elementwise", stream_s(rates, T * inner.inner_forward / tp * widen))
    backward.add("elementwise", stream_s(rates, T * inner.inner_backward / tp * widen))
    if setup.fp8:
        cast = stream_s(rates, T * cast_bytes(shape, setup.fp8) / tp)
        forward.add("elementwise", cast / 2)
        backward.add("elementwise", cast / 2)


def _add_tp(setup: Setup, rates: Rates, gemms: list[_Gemm], forward: Parts, backward: Parts) -> None:
    """Collectives of tensor parallelism: those in the open, and what the hidden ones leave visible."""
    tp, shape = setup.grid.tp, setup.shape
    if tp == 1:
        return
    whole = setup.tokens * shape.hidden * 2
    gather, reduce = (collective_s(rates, kind, whole, tp) for kind in ("all_gather", "all_reduce"))
    dtype = "fp8" if setup.fp8 else setup.dtype
    covers = [gemm_s(rates, gemm.tokens, gemm.n, gemm.k, dtype) for gemm in (gemms[0], gemms[2])]
    if not setup.sequence_parallel:
        forward.add("tp", 2 * reduce)
        for cover in covers:
            backward.add("tp", _hidden(reduce, cover, setup.ordered))
        return
    rows = collective_s(rates, "all_gather", whole / 2, tp) if setup.fp8_rows == "bytes" else gather
    left = TP_OVERLAP_LEFT[setup.tp_overlap]
    forward.add("tp", 2 * (rows + gather) * left)  # a reduce-scatter sends what a gather does
    backward.add("tp", 2 * rows * left)
    if setup.fp8_rows == "bytes" and setup.fp8 == "tensorwise":  # ranks agree on the largest value of a cast
        agreed = collective_s(rates, "all_reduce", AMAX_BYTES, tp, times=2)
        forward.add("tp", agreed)
        backward.add("tp", agreed)
    for cover in covers:  # the input gathered under dgrad, its gradient scattered under wgrad
        backward.add("tp", _hidden(gather, cover, setup.ordered))
        if setup.fp8_rows != "kept":
            backward.add("tp", _hidden(rows, cover, setup.ordered))


def _hidden(seconds: float, cover: float, ordered: bool) -> float:
    """What stays visible of a collective that runs under `cover` seconds of GEMM."""
    if not ordered:
        return seconds - HIDDEN_IF_UNORDERED * min(seconds, cover) + MEET_SLOWER * seconds
    return max(seconds - cover, MEET_SLOWER * seconds)


def _add_experts(setup: Setup, rates: Rates, forward: Parts, backward: Parts) -> None:
    """Tokens to their experts and back, in both passes, with the permutation around it."""
    shape, grid = setup.shape, setup.grid
    tokens = setup.tokens / (grid.tp if setup.sequence_parallel else 1)
    copies = shape.moe_topk if setup.dispatcher != "allgather" else grid.ep
    whole = tokens * shape.hidden * 2 * copies
    kind: Collective = "all_gather" if setup.dispatcher == "allgather" else "all_to_all"
    travel = collective_s(rates, kind, whole, grid.ep, stride=grid.etp)
    left = 0.3 if setup.overlap_experts else 1.0
    for parts in (forward, backward):
        parts.add("ep", 2 * travel * left)
        parts.add("elementwise", stream_s(rates, 6 * tokens * shape.hidden * 2 * shape.moe_topk))


def stream_gather_s(setup: Setup, rates: Rates) -> float:
    """Seconds to gather the residual stream of a microbatch from its tp ranks."""
    return collective_s(rates, "all_gather", setup.tokens * setup.shape.hidden * 2, setup.grid.tp)


def _recompute(setup: Setup, rates: Rates, forward: Parts, gemms: list[_Gemm]) -> Parts:
    """What one layer repeats of its forward pass, as an average over the stage's layers."""
    parts = Parts()
    if setup.recompute == "full":
        share = 1.0
        if setup.recompute_method == "block":
            chunk = setup.layers_per_stage / setup.vpp
            share = min(1.0, setup.recompute_layers / chunk)
        parts.add("recompute", forward.total * share)
        if setup.spread_inputs:
            inputs = share if setup.recompute_method == "block" else 1 / setup.recompute_layers
            parts.add("recompute", inputs * stream_gather_s(setup, rates))
    elif setup.recompute == "selective":
        dtype = "fp8" if setup.fp8 else setup.dtype
        if "core_attn" in setup.recompute_modules:
            parts.add("recompute", _attention_core(setup, rates)[0])
        item = 2 * setup.tokens / setup.grid.tp
        if "activation" in setup.recompute_modules:
            parts.add("recompute", stream_s(rates, item * (setup.shape.fc1_size + setup.shape.ffn)))
        if "layernorm" in setup.recompute_modules:
            split = setup.grid.tp if setup.sequence_parallel else 1
            parts.add("recompute", 2 * stream_s(rates, 2 * setup.tokens / split * 2 * setup.shape.hidden))
        if "mlp" in setup.recompute_modules:
            # Backward needs no result of fc2, nor of what sends it; a compiler sees that and repeats neither.
            again, sent = (
                (gemms[2:3], 0.25 * setup.sequence_parallel) if setup.compiled else (gemms[2:4], 0.5)
            )
            products = sum(gemm_s(rates, gemm.tokens, gemm.n, gemm.k, dtype) for gemm in again)
            parts.add("recompute", products + 0.5 * forward.seconds.get("elementwise", 0.0))
            parts.add("recompute", sent * forward.seconds.get("tp", 0.0))
        if "moe" in setup.recompute_modules:
            parts.add("recompute", 0.6 * forward.total)
    return parts
