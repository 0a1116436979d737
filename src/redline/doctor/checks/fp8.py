"""fp8: where it runs, whether it is worth it, and its settings."""

from __future__ import annotations

from collections.abc import Iterator

from redline.doctor.case import Case
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.formulas.resolve import ffn_size
from redline.formulas.time import gemm_s, stream_s
from redline.formulas.traffic import cast_bytes
from redline.hardware import ADA, BLACKWELL, HOPPER

WORTH = 0.04


def recipe_for(case: Case) -> str:
    """The recipe a device is good at: mxfp8 on Blackwell, current scaling before."""
    return "mxfp8" if case.at_least(BLACKWELL) else "tensorwise"


def layers_worth(case: Case) -> str:
    """Which of a layer's four GEMMs fp8 makes faster, their quantization counted, as "fc1 1.6x, ..."."""
    setup, rates = case.setup, case.rates
    assert setup is not None and rates is not None
    shape, tp, T = setup.shape, setup.grid.tp, setup.tokens
    sites = {
        "qkv": ((shape.q_size + 2 * shape.kv_size) / tp, shape.hidden),
        "proj": (shape.hidden, shape.q_size / tp),
        "fc1": (shape.fc1_size / tp, shape.hidden),
        "fc2": (shape.hidden, shape.ffn / tp),
    }
    both = sum(n + k for n, k in sites.values())
    said = []
    for name, (n, k) in sites.items():
        wide, narrow = (gemm_s(rates, T, n, k, dtype) for dtype in ("bf16", "fp8"))
        cast = stream_s(rates, T * cast_bytes(shape, recipe_for(case)) / tp) * (n + k) / both / 3
        said.append(f"{name} {wide / (narrow + cast):.2f}x")
    return ", ".join(said)


@check("RL012", "kernels", "hint", "fp8_format", needs="cost")
def use_fp8(case: Case) -> Hit | None:
    """12 of the twelve: fp8 on a device that has it."""
    if case.config.precision.fp8_format or not case.at_least(HOPPER) or case.uses("--fp4-format"):
        return None
    values = {
        "fp8_format": "e4m3" if case.at_least(BLACKWELL) else "hybrid",
        "fp8_recipe": recipe_for(case),
        "bf16": True,
        "fp16": False,
    }
    mend = Mend(values=values, safe=False)
    saved = case.saved(mend)
    if saved < WORTH:
        return None
    return Hit(at="bf16", words={"layers": layers_worth(case)}, mend=mend)


@check("RL108", "kernels", "error", "fp8_format", "hidden_size", "seq_length", "micro_batch_size")
def fp8_shapes(case: Case) -> Iterator[Hit]:
    """fp8 GEMMs take tokens in multiples of 8, features of 16 (32 under mxfp8)."""
    if not case.config.precision.fp8_format:
        return
    model, train, tp = case.config.model, case.config.train, case.tp
    unit = 32 if case.get("fp8_recipe") == "mxfp8" else 16
    tokens = train.seq_length * train.micro_batch_size // case.cp
    if tokens % (unit if unit == 32 else 8):
        yield Hit(at="seq_length", words={"what": f"{tokens} tokens", "unit": unit if unit == 32 else 8})
    sizes = (("hidden_size", model.hidden_size), ("ffn_hidden_size", ffn_size(model) / tp))
    for name, size in sizes:
        if size % unit:
            yield Hit(at=name, words={"what": f"--{name.replace('_', '-')}: {size:g}", "unit": unit})


@check("RL109", "kernels", "hint", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_interval")
def fp8_settings(case: Case) -> Iterator[Hit]:
    """Delayed scaling with a short history, an interval that is ignored, a forward-only format."""
    precision = case.config.precision
    if not precision.fp8_format:
        return
    if case.get("fp8_recipe") == "delayed" and case.dialect == "megatron":
        length, algo = case.get("fp8_amax_history_len"), case.get("fp8_amax_compute_algo")
        if length < 16 or algo == "most_recent":
            values = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
            words = {"length": length, "algo": algo}
            yield Hit(at="fp8_amax_history_len", words=words, mend=Mend(values=values, safe=False))
    if precision.fp8_interval != 1:
        yield Hit(at="fp8_interval", text="interval", mend=Mend(values={"fp8_interval": 1}))
    if precision.fp8_format == "e4m3" and case.get("fp8_recipe") in ("delayed", "tensorwise"):
        mend = Mend(values={"fp8_format": "hybrid"}, safe=False)
        yield Hit(at="fp8_format", text="format", severity="warning", mend=mend)


@check("RL110", "kernels", "warning", "fp8_format", needs="cost")
def fp8_not_worth(case: Case) -> Hit | None:
    """GEMMs so small that quantizing costs what fp8 saves."""
    if not case.config.precision.fp8_format or case.get("transformer_impl") == "local":
        return None
    back = Mend(values={"fp8_format": None}, safe=False)
    saved = case.saved(back)
    if saved < -WORTH / 2:
        return None
    return Hit(at="fp8_format", words={"layers": layers_worth(case)}, mend=back)


@check("RL111", "kernels", "error", "fp8_format", "transformer_impl")
def fp8_without_effect(case: Case) -> Hit | None:
    """Megatron's local implementation does not look at the fp8 context."""
    if not case.config.precision.fp8_format or case.get("transformer_impl") != "local":
        return None
    if case.dialect == "redline":
        return None
    return Hit(at="fp8_format", mend=Mend(values={"transformer_impl": "transformer_engine"}))


@check("RL116", "kernels", "error", "fp8_format", "fp8_recipe")
def fp8_device(case: Case) -> Hit | None:
    """A device without the recipe's units."""
    precision = case.config.precision
    if not precision.fp8_format or case.hardware is None or case.hardware.compute_capability is None:
        return None
    recipe, name = case.get("fp8_recipe"), case.hardware.name
    words = {"recipe": recipe, "gpu": name}
    if not case.at_least(ADA):
        return Hit(at="fp8_format", words=words, mend=Mend(values={"fp8_format": None}))
    if recipe == "mxfp8" and not case.at_least(BLACKWELL):
        return Hit(at="fp8_recipe", words=words, mend=_tensorwise(case))
    if recipe == "blockwise" and not case.at_least(HOPPER):
        return Hit(at="fp8_recipe", words=words, mend=_tensorwise(case))
    if recipe in ("blockwise", "delayed") and case.at_least(BLACKWELL):
        mend = Mend(values={"fp8_recipe": "mxfp8", "fp8_format": "e4m3"}, safe=False)
        return Hit(at="fp8_recipe", words=words, text="blackwell", severity="hint", mend=mend)
    return None


def _tensorwise(case: Case) -> Mend:
    """One scale a tensor; gradients then need e5m2's range, which block scales do without."""
    e4m3 = case.config.precision.fp8_format == "e4m3"
    return Mend(values={"fp8_recipe": "tensorwise"} | ({"fp8_format": "hybrid"} if e4m3 else {}))


@check("RL120", "kernels", "hint", "first_last_layers_bf16", "fp8_format")
def fp8_edges(case: Case) -> Hit | None:
    """The first and last layers decide most of fp8's noise, and cost little in bf16."""
    precision = case.config.precision
    if not precision.fp8_format or precision.first_last_layers_bf16 or case.get("fp8_recipe") == "delayed":
        return None
    mend = Mend(values={"first_last_layers_bf16": True}, safe=False)
    return Hit(at="fp8_format", words={"layers": case.config.model.num_layers}, mend=mend)


@check("RL121", "communication", "hint", "fp8_param_gather", "fp8_format")
def fp8_gather(case: Case) -> Hit | None:
    """Parameters travel in 16 bits although they are used in 8."""
    precision, p = case.config.precision, case.config.parallel
    if not precision.fp8_format or precision.fp8_param_gather or not p.use_distributed_optimizer:
        return None
    if (case.dp or 1) == 1 or (case.dialect == "redline" and precision.fp8_param_gather is None):
        return None  # Redline gathers them in 8 bits by itself, where that can be
    same_bits = case.dialect == "redline"
    mend = Mend(values={"fp8_param_gather": True}, safe=same_bits)
    return None if case.trifling(mend) else Hit(at="fp8_format", mend=mend)


@check("RL122", "communication", "warning", "fp8_param_gather", "fp8_recipe", "overlap_param_gather")
def fp8_gather_at_once(case: Case) -> Hit | None:
    """Megatron-LM trained to NaN with mxfp8 parameters that no overlapped gather brings (B046)."""
    if case.dialect != "megatron" or not case.config.precision.fp8_param_gather:
        return None
    if case.get("fp8_recipe") != "mxfp8" or case.get("overlap_param_gather"):
        return None
    mend = Mend(values={"overlap_param_gather": True, "overlap_grad_reduce": True}, safe=False)
    return Hit(at="fp8_param_gather", mend=mend)
