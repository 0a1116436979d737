"""Kernels: implementations, fusions, precision, and shapes that fill the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from redline.doctor.case import Case, unstated
from redline.doctor.finding import Hit, Mend
from redline.doctor.registry import check
from redline.formulas.operators import Operator
from redline.formulas.resolve import ffn_size
from redline.hardware import AMPERE
from redline.plan.cost_setup import virtual_stages
from redline.plan.kernels import SWITCHES

# The ledger's cause that holds an operator's time, fused or not.
CAUSE_OF: Mapping[Operator, str] = {
    "norm": "norm",
    "qk_norm": "norm",
    "rope": "other",
    "activation": "activation",
    "bias_dropout_add": "other",
    "masked_softmax": "attention",
    "embedding": "other",
    "cross_entropy": "loss",
    "linear_cross_entropy": "loss",
    "adamw": "optimizer",
    "grad_norm": "optimizer",
}
SCALING = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
WORTH = 0.01  # of the step time, from which a tuning is worth a line
NO_TOY = 4096  # hidden size from which small GEMMs come from the layout, not from the model


def _on_cpu(case: Case) -> bool:
    """Whether it ran on a CPU, where the plain path is the right one."""
    return case.run is not None and case.run.on_cpu and case.hardware is None


@check("RL001", "kernels", "warning", "transformer_impl")
def fused_implementation(case: Case) -> Hit | None:
    """1 of the twelve: the fused implementation is off."""
    if case.get("transformer_impl") != "local" or _on_cpu(case):
        return None
    if case.dialect == "redline":  # auto takes the fused kernels where they run
        return Hit(at="transformer_impl", severity="hint", mend=Mend(values={"transformer_impl": "auto"}))
    return Hit(at="transformer_impl", mend=Mend(values={"transformer_impl": "transformer_engine"}))


@check("RL002", "kernels", "warning", "attention_backend")
def flash_attention(case: Case) -> Hit | None:
    """2 of the twelve: attention writes its scores out."""
    asked = case.get("attention_backend")
    if _on_cpu(case):
        return None
    if case.env("NVTE_FLASH_ATTN") == "0" and case.env("NVTE_FUSED_ATTN") == "0":
        unset: dict[str, str | None] = {"NVTE_FLASH_ATTN": None, "NVTE_FUSED_ATTN": None}
        return Hit(at="NVTE_FLASH_ATTN", words={"seen": "NVTE_FLASH_ATTN=0"}, mend=Mend(environment=unset))
    if asked == "unfused":
        seen = "--attention-backend unfused"
        return Hit(
            at="attention_backend", words={"seen": seen}, mend=Mend(values={"attention_backend": "auto"})
        )
    if case.dialect == "megatron" and case.get("transformer_impl") == "local":
        mend = Mend(values={"transformer_impl": "transformer_engine", "attention_backend": "auto"})
        return Hit(at="transformer_impl", words={"seen": "--transformer-impl local"}, mend=mend)
    if case.dialect == "megatron" and asked == "local":
        seen = "--attention-backend local"
        return Hit(
            at="attention_backend", words={"seen": seen}, mend=Mend(values={"attention_backend": "auto"})
        )
    return None


@check("RL003", "kernels", "warning", "fp16", "bf16")
def bf16(case: Case) -> Hit | None:
    """3 of the twelve: fp16 or fp32 on a device with bf16 units."""
    if case.at_least(AMPERE) is False:
        return None
    precision = case.config.precision
    if precision.fp16:
        values = {"fp16": False, "bf16": True} | {
            name: unstated(name, case.dialect) for name in SCALING if case.said(name)
        }
        rename = {"--fp16": "--bf16"} if case.uses("--fp16") and not case.uses("--bf16") else {}
        return Hit(at="fp16", words={"seen": "--fp16"}, mend=Mend(values=values, rename=rename))
    if precision.fp32 or (case.dialect == "megatron" and not precision.bf16):
        seen = "--fp32" if precision.fp32 else "--bf16 -"
        mend = Mend(values={"fp32": False, "bf16": True})
        return Hit(at="fp32", words={"seen": seen}, text="fp32", severity="error", mend=mend)
    return None


@check("RL011", "kernels", "warning", "reset_attention_mask", "dataloader_inter_document_masking")
def even_lengths(case: Case) -> Hit | None:
    """11 of the twelve: lengths that vary, or masks where packing would do."""
    if case.config.data.reset_attention_mask and not case.config.data.dataloader_inter_document_masking:
        values = {"reset_attention_mask": False, "dataloader_inter_document_masking": True}
        if case.config.data.reset_position_ids:
            values["reset_position_ids"] = False  # they restart with each document then
        return Hit(at="reset_attention_mask", text="mask", mend=Mend(values=values))
    if use := case.uses("--variable-seq-lengths"):
        return Hit(at=use.flag, words={"seen": use.flag})
    if (use := case.uses("--sft")) and not case.uses("--packing-buffer-size", "--sequence-packing"):
        return Hit(at=use.flag, words={"seen": use.flag}, severity="hint")
    return None


@check("RL101", "kernels", "warning", "make_vocab_size_divisible_by", "pad_vocab_size", "vocab_size")
def vocabulary_padding(case: Case) -> Hit | None:
    """The vocabulary's matrices are no multiple of 64 rows a rank."""
    model, unit = case.config.model, 64 * case.tp
    size = case.setup.shape.padded_vocab_size if case.setup and model.vocab_size else None
    if size is None or size % unit == 0:
        loose = not model.pad_vocab_size or (model.make_vocab_size_divisible_by or 128) % 64
        if size is not None or not loose:
            return None
    at = "make_vocab_size_divisible_by" if model.pad_vocab_size else "pad_vocab_size"
    mend = Mend(values={"pad_vocab_size": True, "make_vocab_size_divisible_by": 128})
    return Hit(at=at, words={"size": size or "?", "unit": unit}, mend=mend)


@check("RL102", "kernels", "hint", "kv_channels", "num_attention_heads", "hidden_size")
def head_size(case: Case) -> Hit | None:
    """Heads that are no multiple of 64 channels, or too wide for the flash kernels."""
    model = case.config.model
    if not model.kv_channels and model.hidden_size % model.num_attention_heads:
        return None
    size = model.kv_channels or model.hidden_size // model.num_attention_heads
    if size in (64, 128, 192, 256):
        return None
    severity = "warning" if size % 8 or size > 256 else "hint"
    return Hit(at="num_attention_heads", words={"size": size}, severity=severity)  # type: ignore[arg-type]


@check("RL103", "kernels", "warning", "hidden_size", "ffn_hidden_size")
def multiples(case: Case) -> Iterator[Hit]:
    """Sizes of GEMMs a rank that are no multiple of 64."""
    model, tp = case.config.model, case.tp
    sizes = (("hidden_size", model.hidden_size, 1), ("ffn_hidden_size", ffn_size(model), tp))
    for name, size, ranks in sizes:
        if size % ranks or (size // ranks) % 64:
            worst = size % ranks != 0 or (size // ranks) % 8 != 0
            words = {"flag": "--" + name.replace("_", "-"), "size": size, "each": size / ranks}
            yield Hit(at=name, words=words, severity="warning" if worst else "hint")


@check("RL104", "kernels", "warning", "micro_batch_size", needs="cost")
def micro_batch(case: Case) -> Hit | None:
    """A microbatch that leaves GEMMs small while memory is free, and fills the pipeline all the same."""
    setup, now = case.setup, case.config.train.micro_batch_size
    assert setup is not None
    best: tuple[float, int] | None = None
    for times in (2, 4, 8):
        left = setup.num_microbatches // times
        if setup.num_microbatches % times or (case.pp > 1 and left < 4 * case.pp):
            break
        mend = Mend(values={"micro_batch_size": now * times})
        saved = case.saved(mend)
        if not case.fits(case.after(mend)):
            break
        if saved > max(0.02, best[0] + 0.01 if best else 0.0):
            best = (saved, now * times)
    if best is None:
        return None
    words = {"now": now, "size": best[1], "tokens": round(setup.tokens)}
    return Hit(at="micro_batch_size", words=words, mend=Mend(values={"micro_batch_size": best[1]}))


@check("RL105", "kernels", "warning", "gradient_accumulation_fusion")
def wgrad_fusion(case: Case) -> Hit | None:
    """Weight gradients are written, then added; torch's FSDP2 allows nothing else."""
    if case.get("gradient_accumulation_fusion") or case.config.parallel.use_torch_fsdp2:
        return None
    mend = Mend(values={"gradient_accumulation_fusion": True})
    return Hit(at="gradient_accumulation_fusion", mend=mend)


@check("RL106", "kernels", "warning", *SWITCHES)
def fusions_off(case: Case) -> Iterator[Hit]:
    """A fusion that is on by default was switched off."""
    if _on_cpu(case):
        return
    for name, operators in SWITCHES.items():
        if not case.said(name) or case.get(name) is not False or _nothing_to_fuse(case, name):
            continue
        causes = tuple(dict.fromkeys(CAUSE_OF[each] for each in operators))
        yield Hit(
            at=name,
            words={"flag": "--no-" + name.replace("_", "-")},
            text="optimizer" if causes == ("optimizer",) else "",
            mend=Mend(values={name: True if case.dialect == "megatron" else None}),
            causes=causes,
        )


def _nothing_to_fuse(case: Case, name: str) -> bool:
    """Whether the model has nothing that this option could switch."""
    if name == "bias_gelu_fusion":
        return case.config.model.activation_func == "swiglu"
    if name == "masked_softmax_fusion":
        return not flash_attention.hits(case)  # others have no softmax of their own
    return name == "cross_entropy_loss_fusion" and case.dialect == "megatron"  # off by default: RL107 tells


@check("RL107", "kernels", "hint", "cross_entropy_loss_fusion")
def loss_fusion(case: Case) -> Hit | None:
    """The loss runs operator by operator over fp32 logits."""
    if case.dialect != "megatron" or case.get("cross_entropy_loss_fusion"):
        return None
    return Hit(at="vocab_size", mend=Mend(values={"cross_entropy_loss_fusion": True}))


@check("RL112", "kernels", "hint", "hidden_dropout", "attention_dropout")
def dropout(case: Case) -> Hit | None:
    """Dropout in pre-training costs masks and passes."""
    model = case.config.model
    hidden, attention = model.hidden_dropout, model.attention_dropout
    if not hidden and not attention:
        return None
    mend = Mend(values={"hidden_dropout": 0.0, "attention_dropout": 0.0}, safe=False)
    if case.trifling(mend):
        return None
    at = "hidden_dropout" if hidden else "attention_dropout"
    return Hit(at=at, words={"hidden": hidden, "attention": attention}, mend=mend)


@check("RL113", "kernels", "warning", "deterministic_mode")
def deterministic(case: Case) -> Hit | None:
    """Deterministic kernels are slower ones."""
    if not case.get("deterministic_mode"):
        return None
    return Hit(at="deterministic_mode", mend=Mend(values={"deterministic_mode": False}))


@check("RL115", "kernels", "hint", "fp32_residual_connection")
def wide_residual(case: Case) -> Hit | None:
    """A residual stream in fp32 doubles the bytes of norms and of tp and pp messages."""
    if not case.get("fp32_residual_connection"):
        return None
    mend = Mend(values={"fp32_residual_connection": False}, safe=False)
    return Hit(at="fp32_residual_connection", mend=mend)


@check("RL117", "kernels", "warning", "num_experts", "moe_grouped_gemm")
def grouped_gemm(case: Case) -> Hit | None:
    """Experts' GEMMs one by one."""
    if not case.config.moe.num_experts or case.get("moe_grouped_gemm"):
        return None
    return Hit(
        at="num_experts",
        words={"experts": case.config.moe.num_experts},
        mend=Mend(values={"moe_grouped_gemm": True}),
    )


@check("RL118", "kernels", "hint", "num_experts", "moe_permute_fusion")
def permute_fusion(case: Case) -> Hit | None:
    """Tokens are permuted for their experts by several kernels."""
    if not case.config.moe.num_experts or case.get("moe_permute_fusion"):
        return None
    return Hit(at="num_experts", mend=Mend(values={"moe_permute_fusion": True}))


@check("RL119", "kernels", "hint", "num_layers_per_virtual_pipeline_stage", needs="cost")
def toy_shape(case: Case) -> Hit | None:
    """A model too small for its device: nothing but its size will help much."""
    cost, setup = case.cost, case.setup
    assert cost is not None and setup is not None
    tokens_per_layer = setup.tokens * setup.shape.hidden / setup.grid.tp
    if setup.shape.hidden >= NO_TOY:
        return None
    if tokens_per_layer >= 2**21 or cost.mfu["causal-half"] > 0.3 or virtual_stages(case.config) > 8:
        return None
    words = {
        "hidden": setup.shape.hidden,
        "tokens": round(setup.tokens),
        "mfu": f"{cost.mfu['causal-half']:.0%}",
    }
    return Hit(at="hidden_size", words=words)
