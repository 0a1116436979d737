"""Why an option cannot be used: the work it waits for, or a decision against it.

A field names one of these as `waits_for` (the whole option) or in `refused` (single values). Once the option
works, that word is deleted in its section. The names are the rules that a refusal cites.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waits:
    """One reason for refusing.

    Attributes:
        topic: the last part of the rule's name.
        why: what is missing (`never` False) or what Redline does instead (`never` True), as a clause.
        mend: what to use now.
        never: True when no later release is meant to change it.
    """

    topic: str
    why: str
    mend: str = "leave it out."
    never: bool = False

    @property
    def rule(self) -> str:
        """The name of the rule that refuses: "not-available-yet/fp8" or "not-in-redline/fsdp"."""
        return f"not-in-redline/{self.topic}" if self.never else f"not-available-yet/{self.topic}"


PIPELINE_PARALLEL = Waits("pipeline-parallel", "it waits for pipeline parallelism.")
CONTEXT_PARALLEL = Waits(
    "context-parallel", "it waits for context parallelism.", "leave it out, or shorten --seq-length."
)
EXPERT_PARALLEL = Waits("expert-parallel", "it waits for mixture-of-experts training.")
FP8 = Waits("fp8", "it waits for further storage in fp8.")
LOCAL_AMAX = Waits(
    "local-amax",
    "all ranks share largest values, so that a checkpoint with one scale an operand resumes exactly.",
    never=True,
)
FP4 = Waits("fp4", "it waits for 4-bit floating point.", "train in bf16 (--bf16).")
QUANTIZED = Waits(
    "quantized-training", "it waits for quantized training (int8, int4, mxfp4).", "train in bf16 (--bf16)."
)
MTP = Waits("multi-token-prediction", "it waits for multi-token prediction.")
MOE = Waits(
    "mixture-of-experts", "it waits for mixture-of-experts training.", "train a dense model: leave it out."
)
GRAPH_SCOPES = Waits(
    "graph-scopes",
    "a whole microbatch is recorded, forward and backward, whatever its modules.",
    "use --cuda-graph-impl local and leave it out.",
    never=True,
)
WHOLE_STEP_GRAPHS = Waits(
    "whole-step-graphs",
    "the update decides on the host whether the step may be applied.",
    "use --cuda-graph-impl local, which records each microbatch.",
    never=True,
)
FP8_ATTENTION = Waits(
    "fp8-attention",
    "no backend has an fp8 backward: FlashAttention 4 has a forward only, PyTorch hands cuDNN none, "
    "Redline's own kernels multiply in 16 bits.",
    "leave it out: attention runs in the compute dtype.",
)
TRANSFORMER_ENGINE_PARTS = Waits(
    "transformer-engine",
    "of the package transformer-engine Redline uses the modules of layers alone.",
    "leave it out: Redline's own needs no package.",
    never=True,
)
ATTENTION_VARIANTS = Waits(
    "attention-variants", "it waits for further kinds of attention.", "use plain causal attention."
)
POSITIONS = Waits(
    "positions", "it waits for further position embeddings.", "use rope, learned_absolute or none."
)
NUMERICS = Waits("numerics", "it waits for this variant of the arithmetic.")
CHECKS = Waits(
    "anomaly-checks",
    "it waits for further anomaly checks.",
    "rely on --check-for-nan-in-loss-and-grad, which is on.",
)
TIMERS = Waits(
    "timers",
    "the ledger accounts for every instant of a step, without timers inside it.",
    "use --profile-ledger, which is on, and --ledger-interval.",
    never=True,
)
LOGGING = Waits("logging", "it waits for further metrics.", "leave it out; metrics.jsonl holds every step.")
LOCAL_CHECKPOINTS = Waits(
    "local-checkpoints",
    "it waits for checkpoints that are not meant to last.",
    "use --save-interval, which keeps the newest --keep-checkpoints.",
)
BATCH_SIZES = Waits(
    "batch-sizes",
    "it waits for training on more than one process.",
    "choose a multiple of --micro-batch-size.",
)
DATA_FILES = Waits(
    "data-files", "it waits for reading paths from a file.", "list the paths after --data-path."
)

DATA_SHARDING = Waits(
    "data-sharding",
    "which sample comes next is a function of the samples consumed, whatever the number of ranks.",
    "leave it out, or say --no-data-sharding.",
    never=True,
)
REPLICAS = Waits(
    "unlike-replicas",
    "data-parallel ranks hold the same parameters, and gradients of different ones do not add up.",
    "use another --seed to begin from other weights.",
    never=True,
)
AVERAGING = Waits(
    "averaging",
    "gradients carry their share of the token mean from the loss on: collectives only add.",
    "leave it out: no pass that divides gradients is left to save.",
    never=True,
)
STRAGGLER_CONTROL = Waits(
    "straggler-control",
    "ranks are compared from the start to the end of a run, which no port switches.",
    "leave it out: a comparison is one small message each --log-interval.",
    never=True,
)
NCCL_SETTINGS = Waits(
    "nccl-settings",
    "NCCL reads its settings from the environment and from nccl.conf, which Redline leaves to it.",
    "set NCCL_* variables; the run records them.",
    never=True,
)
LOCAL_ACCUMULATION = Waits(
    "local-accumulation",
    "a gradient has one dtype, in which it is both accumulated and sent.",
    "leave --grad-reduce-in-bf16 out: all gradients are then accumulated in fp32.",
    never=True,
)
FSDP = Waits(
    "fsdp",
    "Redline shards optimizer states (ZeRO-1), never parameters.",
    "leave it out; one process holds the whole model.",
    never=True,
)
USER_BUFFERS = Waits(
    "user-buffers",
    "it sets up Transformer Engine's buffers; Redline overlaps by pieces or by PyTorch's symmetric memory.",
    "use --tp-comm-overlap-method and --tp-comm-overlap-chunks.",
    never=True,
)
OPTIMIZERS = Waits("optimizers", "Redline's optimizer is AdamW.", "use --optimizer adam.", never=True)
CHECKPOINT_FORMATS = Waits(
    "checkpoint-formats",
    "Redline writes one format, safetensors and JSON, that loads under any layout.",
    "leave it out: --ckpt-format torch_dist names Redline's own format.",
    never=True,
)
TOKENIZERS = Waits(
    "tokenizers",
    "Redline reads Hugging Face tokenizer.json files and GPT-2 vocabularies.",
    "use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model tokenizer.json.",
    never=True,
)
CUSTOM_CODE = Waits(
    "custom-code",
    "Redline runs no code named on the command line.",
    "use --transformer-impl local.",
    never=True,
)
CUSTOM_RECIPE = Waits(
    "custom-recipe",
    "Redline runs no code named on the command line.",
    "use --fp8-recipe delayed, tensorwise, blockwise or mxfp8; --fp8-keep-bf16 keeps single GEMMs in bf16.",
    never=True,
)
RETIRED = Waits("retired", "Megatron itself has retired it.", "leave it out.", never=True)
RETIRED_CHECKPOINTING = Waits(
    "retired", "Megatron itself has retired it for --recompute-activations.", "leave it out.", never=True
)
KITCHEN_PACKAGE = Waits(
    "kitchen-package",
    "it configures a private package of NVIDIA's.",
    "state the method and target with --kitchen-quant-method and --kitchen-quant-target.",
    never=True,
)
EXTERNAL_LOADER = Waits(
    "external-loader",
    "Redline resumes by sample number, which a foreign loader cannot promise.",
    "use single or cyclic.",
    never=True,
)
INFERENCE_ONLY = Waits("inference", "it serves inference only.", "use --transformer-impl local.", never=True)
HALF_MAIN = Waits(
    "half-precision-main-parameters",
    "under --bf16 the exact fp32 main parameter takes the same 16 bits beside the parameter.",
    "leave it out: --use-precision-aware-optimizer stores that.",
    never=True,
)
HALF_MOMENTS = Waits(
    "half-precision-moments",
    "squares of gradients are below the range of fp16.",
    "use bf16, which takes as many bytes.",
    never=True,
)
HALF_LOSS = Waits(
    "half-precision-loss", "the loss is computed in fp32, or fp64 under --fp64.", "leave it out.", never=True
)
