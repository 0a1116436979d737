"""Old spellings of flags and what takes their place.

A rewritten flag means the very same as the words it is rewritten to, and is read as them: a script of 2021
states its layout as clearly as one of today. The others have a successor that does the same job, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.config.problems import Problem


@dataclass(frozen=True, slots=True)
class Successor:
    """What became of a flag.

    Attributes:
        why: a sentence about the old flag.
        mend: what to write now, "" to delete it; "{}" is its value.
        same: whether the new words mean exactly what the old ones did.
    """

    why: str
    mend: str
    same: bool = False


RENAMED = "Megatron renamed it and refuses the old name."
IGNORED = "Megatron accepts it and does nothing."
REMOVED = "Megatron removed it."
FORK = "it is a flag of Megatron-DeepSpeed."


def _renamed(flag: str) -> Successor:
    return Successor(RENAMED, f"{flag} {{}}", same=True)


SUCCESSORS: dict[str, Successor] = {
    "--model-parallel-size": _renamed("--tensor-model-parallel-size"),
    "--batch-size": _renamed("--micro-batch-size"),
    "--checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--activations-checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--activations-checkpoint-method": Successor(
        RENAMED, "--recompute-granularity full --recompute-method {}", same=True
    ),
    "--checkpoint-activations": Successor(
        "Megatron stops at it: recompute has a granularity now.",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        same=True,
    ),
    "--distribute-checkpointed-activations": Successor(RENAMED, "--distribute-saved-activations", same=True),
    "--override-lr-scheduler": Successor(RENAMED, "--override-opt_param-scheduler", same=True),
    "--use-checkpoint-lr-scheduler": Successor(RENAMED, "--use-checkpoint-opt_param-scheduler", same=True),
    "--warmup": Successor("Megatron stops at it.", "--lr-warmup-fraction or --lr-warmup-iters"),
    "--DDP-impl": Successor(REMOVED, "--use-distributed-optimizer --overlap-grad-reduce"),
    "--data-impl": Successor(f"{REMOVED} Token files are always mapped into memory.", ""),
    "--mmap-warmup": Successor(REMOVED, ""),
    "--no-contiguous-buffers-in-local-ddp": Successor(f"{REMOVED} Buffers are always contiguous.", ""),
    "--no-async-tensor-model-parallel-allreduce": Successor(IGNORED, ""),
    "--no-scatter-gather-tensors-in-pipeline": Successor(IGNORED, ""),
    "--no-query-key-layer-scaling": Successor(f"{REMOVED} It is off unless asked for.", ""),
    "--use-mcore-models": Successor(IGNORED, ""),
    "--use-legacy-models": Successor(f"{REMOVED} The legacy models had no fused implementation.", ""),
    "--use-flash-attn": Successor("Megatron keeps it for old scripts.", "--attention-backend flash"),
    "--use-flash-attn-v1": Successor(FORK, "--attention-backend flash"),
    "--use-flash-attn-v2": Successor(FORK, "--attention-backend flash"),
    "--use-flash-attn-triton": Successor(FORK, "--attention-backend flash"),
    "--fp8": Successor("Megatron has no such flag.", "--fp8-format hybrid"),
    "--fp8-hybrid": Successor("Megatron had it until August 2023.", "--fp8-format hybrid"),
    "--fp8-e4m3": Successor("Megatron had it until August 2023.", "--fp8-format e4m3"),
    "--fp8-interval": Successor("Transformer Engine ignores it since 1.8.", ""),
    "--tp-comm-split-ag": Successor("Transformer Engine retired it in 1.6.", "--tp-comm-overlap"),
    "--tp-comm-split-rs": Successor("Transformer Engine retired it in 1.6.", "--tp-comm-overlap"),
    "--tp-comm-atomic-ag": Successor("Transformer Engine retired it in 1.6.", "--tp-comm-overlap"),
    "--tp-comm-atomic-rs": Successor("Transformer Engine retired it in 1.6.", "--tp-comm-overlap"),
    "--disable-tp-comm-split-ag": Successor(RENAMED, "--disable-tp-comm-overlap-ag", same=True),
    "--disable-tp-comm-split-rs": Successor(RENAMED, "--disable-tp-comm-overlap-rs", same=True),
    "--moe-layer-recompute": Successor(
        "Megatron deprecated it.", "--recompute-granularity selective --recompute-modules moe"
    ),
    "--moe-extended-tp": Successor("Megatron deprecated it.", "--expert-tensor-parallel-size"),
    "--moe-use-legacy-grouped-gemm": Successor("Megatron deprecated it.", "--moe-grouped-gemm alone"),
    "--moe-enable-deepep": Successor(
        "Megatron deprecated it.", "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
    ),
    "--moe-router-padding-for-fp8": Successor(
        "Megatron deprecated it.", "--moe-router-padding-for-quantization"
    ),
    "--use-custom-fsdp": Successor("Megatron renamed it.", "--use-megatron-fsdp"),
    "--use-dist-ckpt": Successor("Megatron deprecated it.", "--ckpt-format torch_dist", same=True),
    "--dist-ckpt-format": Successor("Megatron deprecated it.", "--ckpt-format {}", same=True),
    "--ckpt-fully-parallel-save": Successor("It is on by default.", ""),
    "--delay-grad-reduce": Successor(f"{REMOVED} Pipeline stages start their reduces aligned.", ""),
    "--delay-param-gather": Successor(f"{REMOVED} Pipeline stages start their gathers aligned.", ""),
    "--pipeline-model-parallel-split-rank": Successor(REMOVED, ""),
    "--standalone-embedding-stage": Successor(REMOVED, "--account-for-embedding-in-pipeline-split"),
    "--enable-cuda-graph": Successor("Megatron deprecated it.", "--cuda-graph-impl local"),
    "--external-cuda-graph": Successor("Megatron deprecated it.", "--cuda-graph-impl transformer_engine"),
    "--no-position-embedding": Successor(
        "Megatron deprecated it.", "--position-embedding-type rope (or none)"
    ),
    "--use-rotary-position-embeddings": Successor(
        "Megatron deprecated it.", "--position-embedding-type rope"
    ),
    "--use-llama2-rotary-position-embeddings": Successor(
        "it is a flag of Pai-Megatron-Patch.", "--position-embedding-type rope", same=True
    ),
    "--layernorm-epsilon": Successor("Megatron renamed it.", "--norm-epsilon {}"),
    "--rampup-batch-size": Successor(
        "Megatron deprecated it in 2026 and ignores it; Redline still obeys it.",
        '--step-batch-size-schedule "TOKENS:BATCH ..."',
    ),
    "--pad-vocab-size-to": Successor("it is a flag of BLOOM's fork.", "--padded-vocab-size {}", same=True),
    "--tokenizer-name-or-path": Successor("it is a flag of BLOOM's fork.", "--tokenizer-model {}"),
    "--train-tokens": Successor(FORK, "--train-samples (tokens / --seq-length)"),
    "--lr-decay-tokens": Successor(FORK, "--lr-decay-samples (tokens / --seq-length)"),
    "--lr-warmup-tokens": Successor(FORK, "--lr-warmup-samples (tokens / --seq-length)"),
    "--num-key-value-heads": Successor(FORK, "--group-query-attention --num-query-groups {}", same=True),
    "--rope-theta": Successor(FORK, "--rotary-base {}", same=True),
    "--attention-head-type": Successor(
        "it is a flag of BigCode's fork.", "--group-query-attention --num-query-groups 1 for multiquery"
    ),
    "--zero-stage": Successor(FORK, "--use-distributed-optimizer (ZeRO-1)"),
    "--ds-sequence-parallel-size": Successor(FORK, "--context-parallel-size {} --cp-comm-type a2a"),
    "--no-pipeline-parallel": Successor(FORK, "--pipeline-model-parallel-size 1"),
    "--deepspeed-activation-checkpointing": Successor(
        f"{FORK} It says whose code recomputes; --checkpoint-activations says that it does.", ""
    ),
    "--hybrid-override-pattern": Successor("Megatron deprecated it.", "--hybrid-layer-pattern {}"),
    "--mtp-hybrid-override-pattern": Successor("Megatron deprecated it.", "--hybrid-layer-pattern"),
}


def rewritten(flag: str, value: str | None) -> list[str] | None:
    """The words that mean the same as an old flag, or None when there are none."""
    successor = SUCCESSORS.get(flag)
    if successor is None or not successor.same:
        return None
    return successor.mend.format(value or "").split()


def old_spelling(flag: str, value: str | None) -> Problem | None:
    """The problem of a flag that has a successor, None for any other."""
    successor = SUCCESSORS.get(flag)
    if successor is None:
        return None
    shown = f"{flag} {value}" if value else flag
    words = successor.mend.format(value or "").strip()
    mend = f"write {words}." if words else "leave it out."
    flags = (flag, *(word for word in words.split() if word.startswith("--")))
    return Problem(
        "old-spelling", f"{shown} is an old spelling.", successor.why, mend, tuple(dict.fromkeys(flags))
    )
