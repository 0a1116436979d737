"""Which operators run as fused kernels: `--transformer-impl` for all, a switch for each, and the reasons.

Obeyed or refused: an operator asked for by name runs fused or the start fails; only `auto` may fall back, and
says why. What this decides is the same for a prediction on paper and for a run; a run adds what only the
machine and the kernels know (`why_not`, `limits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from redline.choice import Choice
from redline.config import KernelsConfig
from redline.config.flags import to_flag
from redline.errors import ConfigError
from redline.formulas.operators import Operator
from redline.formulas.shape import ModelShape

FUSED_PRECISIONS = frozenset(("bf16", "fp16", "fp32"))
# The option of every operator that runs unless somebody objects. The model's activation says which of two
# options acts, --cross-entropy-fusion-impl which of two operators.
SWITCHES: Mapping[str, tuple[Operator, ...]] = {
    "persist_layer_norm": ("norm", "qk_norm"),
    "rope_fusion": ("rope",),
    "bias_gelu_fusion": ("activation",),
    "bias_swiglu_fusion": ("activation",),
    "bias_dropout_fusion": ("bias_dropout_add",),
    "masked_softmax_fusion": ("masked_softmax",),
    "cross_entropy_loss_fusion": ("linear_cross_entropy", "cross_entropy"),
    "embedding_fusion": ("embedding",),
    "adamw_fusion": ("adamw",),
    "grad_norm_fusion": ("grad_norm",),
}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The operators that run fused, and the record of every decision."""

    fused: frozenset[Operator]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which operators would run.

    Attributes:
        device: "cuda" or "cpu".
        precision: of compute: "fp64" "fp32" "bf16" "fp16".
        attention: the backend; only "unfused" has a softmax of its own.
        why_not: why no kernel can run here; None where they can.
        limits: why the kernel of one operator cannot take this model.
        why_no_engine: why the modules of transformer-engine cannot run; known where they are asked for.
    """

    device: str
    precision: str
    attention: str
    why_not: str | None = None
    why_no_engine: str | None = None
    limits: Mapping[Operator, str] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why no kernel can run, the precision taken in."""
        if self.precision not in FUSED_PRECISIONS:
            return f"there is no fused kernel for {self.precision} (bf16, fp16 and fp32 have one)"
        return self.why_not


@dataclass(frozen=True, slots=True)
class Switch:
    """One option and what it switches in this model; `absent` says why the model has nothing of the kind."""

    field: str
    operators: tuple[Operator, ...]
    absent: str | None = None


def choose_kernels(config: KernelsConfig, shape: ModelShape, at: Conditions) -> KernelChoice:
    """Decide for every operator.

    Raises: ConfigError when what was asked for by name cannot run, or has nothing to act on.
    """
    whole = _implementation(config.transformer_impl, at)
    fused: set[Operator] = set()
    choices = [whole]
    for switch in _switches(config, shape, at):
        asked = getattr(config, switch.field)
        if asked and switch.absent:
            raise _refused(switch.field, switch.absent, f"leave {to_flag(switch.field)} out.")
        if switch.absent and asked is False:
            choices.append(_choice(switch, asked, "local", f"nothing to switch off: {switch.absent}"))
        if switch.absent or (asked is None and whole.ran == "local"):
            continue
        reasons = {each: why for each in switch.operators if (why := at.refusal or at.limits.get(each))}
        if asked and reasons:
            reason = "; ".join(dict.fromkeys(reasons.values()))
            raise _refused(
                switch.field, reason, f"leave {to_flag(switch.field)} out; its plain twin then runs."
            )
        run = [each for each in switch.operators if asked is not False and each not in reasons]
        fused.update(run)
        if whole.ran == "transformer_engine" and "activation" in switch.operators:
            continue  # it is inside the package's MLP, which keeps what the fused one keeps
        choices.append(_choice(switch, asked, _ran(switch, run), _why(switch, asked, reasons)))
    if config.fused_residual_rmsnorm:
        _check_residual(shape, fused)
        fused.add("residual_norm")
        choices.append(Choice("fused-residual-rmsnorm", "fused", "fused", "asked for by name"))
    _check_loss(config, fused)
    return KernelChoice(frozenset(fused), tuple(choices))


def _implementation(asked: str, at: Conditions) -> Choice:
    """What `--transformer-impl` runs."""
    what, reason = "transformer-impl", at.refusal
    if asked == "local":
        return Choice(what, asked, "local", "asked for by name: plain PyTorch")
    if asked == "fused":
        if reason:
            raise ConfigError(
                "--transformer-impl fused cannot run here.",
                f"{reason}.",
                "use --transformer-impl auto, which takes the fused kernels where they run.",
            )
        return Choice(what, asked, "fused", "asked for by name: Redline's Triton kernels")
    if asked == "transformer_engine":
        return _engine(what, asked, at)
    if at.device != "cuda":
        return Choice(what, asked, "local", "plain PyTorch: the fused kernels are for a GPU")
    if reason:
        return Choice(what, asked, "local", f"plain PyTorch: {reason}")
    return Choice(what, asked, "fused", "Redline's Triton kernels: a GPU and Triton are there")


def _engine(what: str, asked: str, at: Conditions) -> Choice:
    """NVIDIA's modules for norms, GEMMs and activation; every operator beside them as under `fused`."""
    reason = (
        None if at.device == "cuda" else "the modules of the package transformer-engine run on a GPU alone"
    )
    reason = at.why_no_engine or reason or at.refusal
    if reason is None:
        return Choice(what, asked, asked, "asked for by name: NVIDIA's modules for norms, GEMMs, activation")
    raise ConfigError(
        "--transformer-impl transformer_engine cannot run here.",
        f"{reason}.",
        "use --transformer-impl fused, which needs no package and has its own fp8; or, where there is a GPU, "
        "pip install --no-build-isolation 'transformer-engine[pytorch]'.",
    )


def _switches(config: KernelsConfig, shape: ModelShape, at: Conditions) -> Iterator[Switch]:
    """SWITCHES, each with what it switches in this model."""
    loss: Operator = (
        "cross_entropy" if config.cross_entropy_fusion_impl == "native" else "linear_cross_entropy"
    )
    for name, operators in SWITCHES.items():
        acting = (loss,) if name == "cross_entropy_loss_fusion" else operators
        if shape.qk_norm == "none":
            acting = tuple(each for each in acting if each != "qk_norm")
        yield Switch(name, acting, _absent(name, shape, at.attention))


def _absent(name: str, shape: ModelShape, attention: str) -> str | None:
    """Why the model has nothing that this option could switch, or None."""
    if name == "rope_fusion" and shape.position != "rope":
        return "the model turns no queries or keys"
    if name == "masked_softmax_fusion" and attention != "unfused":
        return f"{attention} attention has no softmax of its own"
    own = "bias_swiglu_fusion" if shape.activation == "swiglu" else "bias_gelu_fusion"
    if "activation" in SWITCHES[name] and name != own:
        return f"the model's activation is {shape.activation}"
    return None


def _ran(switch: Switch, run: Sequence[Operator]) -> str:
    """What runs of a switch's operators, of which each has limits of its own."""
    if run and len(run) < len(switch.operators):
        plain = [each for each in switch.operators if each not in run]
        return f"{_words(run)} fused, {_words(plain)} local"
    return "fused" if run else "local"


def _words(operators: Iterable[Operator]) -> str:
    return " and ".join(operators).replace("_", " ")


def _why(switch: Switch, asked: bool | None, reasons: Mapping[Operator, str]) -> str:
    if asked is False:
        return f"switched off by --no-{to_flag(switch.field)[2:]}"
    if asked:
        return "asked for by name"
    return "; ".join(dict.fromkeys(reasons.values())) or f"one kernel for {_words(switch.operators)}"


def _choice(switch: Switch, asked: bool | None, ran: str, why: str) -> Choice:
    words = {None: "auto", True: "fused", False: "local"}
    return Choice(to_flag(switch.field)[2:], words[asked], ran, why)


def _check_loss(config: KernelsConfig, fused: set[Operator]) -> None:
    """The kind of fused loss that was named must be one that runs."""
    if config.cross_entropy_fusion_impl == "native" and "cross_entropy" not in fused:
        raise ConfigError(
            "--cross-entropy-fusion-impl native has no effect.",
            "the loss is not fused.",
            "add --cross-entropy-loss-fusion on a GPU, or leave it out.",
        )


def _check_residual(shape: ModelShape, fused: set[Operator]) -> None:
    """It is a form of the fused RMSNorm."""
    name = "fused_residual_rmsnorm"
    if shape.normalization != "RMSNorm":
        raise _refused(name, f"the model's norm is {shape.normalization}", f"leave {to_flag(name)} out.")
    if "norm" not in fused:
        raise _refused(name, "the norms run in plain PyTorch", "use --transformer-impl fused on a GPU.")


def _refused(name: str, reason: str, mend: str) -> ConfigError:
    return ConfigError(f"{to_flag(name)} cannot be obeyed.", f"{reason}.", mend)
