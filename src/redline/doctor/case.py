"""What is examined: a launch with its predicted cost, a machine, a run; whatever of them there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from redline.config.flags import UNSET
from redline.config.rules import violations
from redline.config.tree import options_by_field, with_values
from redline.doctor.finding import Mend
from redline.doctor.links import linked
from redline.errors import RedlineError
from redline.formulas.time import Rates
from redline.hardware import BLACKWELL, TURING, Hardware, MeasuredLinks
from redline.plan.cost import StepCost, predict
from redline.plan.cost_rates import rates_of
from redline.plan.cost_setup import Dialect, Setup, effective, setup_of

if TYPE_CHECKING:
    from redline.config import RunConfig
    from redline.config.launch import FlagUse, Launch
    from redline.doctor.machine import Machine
    from redline.doctor.runs import RunRecord

TRIFLE, TRIFLE_BYTES = 0.001, 0.02  # of a step, of the card
CDMC = "CUDA_DEVICE_MAX_CONNECTIONS"
# In Megatron-LM these have no default: unstated, they are unknown, and nothing is predicted.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything the checks look at.

    Attributes:
        launch: the script or configuration, None when only a machine is examined.
        dialect: whose defaults and rules hold for it.
        world_size: devices, None when nothing says so.
        hardware: the device it runs on, None when unknown.
        gpus_per_node: devices that share NVLink.
        assumed: names of facts that were assumed for the prediction ("gpu", "gpus", "vocab_size").
        environment: variable -> value, of the launch or of this process.
        links: of cards whose collectives were measured here (`redline bench comm`).
        machine, run: what was measured or read of them.
    """

    launch: Launch | None = None
    dialect: Dialect = "megatron"
    world_size: int | None = None
    hardware: Hardware | None = None
    gpus_per_node: int = 8
    assumed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, MeasuredLinks] = field(default_factory=dict)
    machine: Machine | None = None
    run: RunRecord | None = None

    def has(self, needs: str) -> bool:
        """Whether a check with this need can run."""
        if needs == "launch":
            return self.launch is not None
        if needs == "cost":
            return self.cost is not None
        if needs == "environment":
            return self.launch is not None or self.machine is not None
        return getattr(self, needs) is not None

    # -- the configuration ---------------------------------------------------------------------------------

    @property
    def config(self) -> RunConfig:
        """The launch's options."""
        assert self.launch is not None
        return self.launch.config

    def get(self, name: str) -> Any:
        """The value of an option as the program takes it."""
        assert self.launch is not None
        return effective(self.config, name, self.dialect, self.launch.stated)

    def missing(self, name: str) -> bool:
        """Whether Megatron-LM needs this option and the launch does not state it."""
        return self.dialect == "megatron" and name in REQUIRED and not self.said(name)

    def said(self, name: str) -> bool:
        """Whether the launch states this option."""
        return self.launch is not None and name in self.launch.stated

    def on(self, name: str) -> bool:
        """Whether a switch is on; unset, Redline has its overlaps and fusions on by itself."""
        value = self.get(name)
        return self.dialect == "redline" if value is None else bool(value)

    def uses(self, *flags: str) -> FlagUse | None:
        """The last use of any of these flags, whether or not it was understood."""
        if self.launch is None:
            return None
        return next((use for use in reversed(self.launch.flags) if use.flag in flags), None)

    def place(self, at: str) -> tuple[str | None, int | None]:
        """(file, line) of an option field, a variable or a flag."""
        if self.launch is None:
            return None, None
        for use in (*reversed(self.launch.flags), *self.launch.cut_off):
            if at and at in (use.field, use.flag):
                return str(use.file), use.line
        if at in self.launch.environment:
            place = self.launch.environment[at][1]
            return str(place.file), place.line
        return str(self.launch.path), None

    def env(self, name: str) -> str | None:
        """A variable's value, None when it is not set."""
        return self.environment.get(name)

    # -- the layout ----------------------------------------------------------------------------------------

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        size: int = self.config.parallel.tensor_model_parallel_size
        return size

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        size: int = self.config.parallel.pipeline_model_parallel_size
        return size

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        size: int = self.config.parallel.context_parallel_size
        return size

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks, None when the number of devices is not known or does not divide."""
        model = self.tp * self.pp * self.cp
        if self.world_size is None or self.world_size % model:
            return None
        return self.world_size // model

    @property
    def nodes(self) -> int:
        """Nodes it spans."""
        return -(-(self.world_size or 1) // self.gpus_per_node)

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded by an FSDP."""
        p = self.config.parallel
        return p.use_torch_fsdp2 or p.use_megatron_fsdp

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step on a rank."""
        return self.setup.num_microbatches if self.setup else None

    def at_least(self, capability: tuple[int, int]) -> bool | None:
        """Whether the device is of this generation or newer; None when unknown."""
        if self.hardware is None or self.hardware.compute_capability is None:
            return None
        return self.hardware.compute_capability >= capability

    @property
    def needs_one_queue(self) -> bool:
        """Whether CUDA_DEVICE_MAX_CONNECTIONS must be 1: tp or cp before Blackwell, no FSDP or EP overlap."""
        if self.at_least(BLACKWELL) or self.fsdp or self.config.moe.overlap_moe_expert_parallel_comm:
            return False
        return self.tp > 1 or self.cp > 1

    def in_order(self, queue: str | None) -> bool:
        """Whether collectives start in time: one queue keeps their order, but holds an FSDP's gathers up."""
        if self.fsdp:
            return queue != "1" or self.at_least(BLACKWELL) is True
        return not self.needs_one_queue or queue == "1"

    # -- the prediction ------------------------------------------------------------------------------------

    @cached_property
    def rates(self) -> Rates | None:
        """Calibrated rates of the device; None without a data sheet."""
        if self.hardware is None:
            return None
        try:
            rates = rates_of(self.hardware, gpus_per_node=self.gpus_per_node, measured=self.links)
        except RedlineError:
            return None
        return linked(rates, self.hardware, self.environment, self.machine)

    @cached_property
    def setup(self) -> Setup | None:
        """What the cost model reads; None when the numbers do not fit together."""
        return self._setup(Mend())

    @cached_property
    def cost(self) -> StepCost | None:
        """The predicted step as it stands."""
        return self.after(Mend())

    def after(self, *mends: Mend) -> StepCost | None:
        """The predicted step with these mends; None when it cannot be predicted."""
        merged = merge(mends)
        setup = self._setup(merged)
        rates = self.mended(merged).rates if merged.environment else self.rates
        return predict(setup, rates) if setup and rates else None

    def sees(self, mend: Mend) -> bool:
        """Whether the cost model looks at anything that a mend changes."""
        return self._setup(mend) != self.setup or self.mended(mend).rates != self.rates

    def _setup(self, mend: Mend) -> Setup | None:
        if self.launch is None or self.world_size is None or any(map(self.missing, REQUIRED)):
            return None
        try:
            changed = self.mended(mend)
            assert changed.launch is not None
            queue = changed.env(CDMC)
            return setup_of(
                changed.config,
                self.world_size,
                dialect=self.dialect,
                stated=changed.launch.stated,
                ordered=self.dialect == "redline" or changed.in_order(queue),
                flash_available=self.at_least(TURING) is not False and not changed.scores_written,
            )
        except RedlineError:
            return None

    @property
    def scores_written(self) -> bool:
        """Whether the environment or an explicit mask rules out every attention that keeps no scores."""
        te = self.env("NVTE_FLASH_ATTN") == "0" and self.env("NVTE_FUSED_ATTN") == "0"
        return te or self.config.data.reset_attention_mask

    def mended(self, mend: Mend) -> Case:
        """The case with a mend applied."""
        if self.launch is None or not mend.acts:
            return self
        launch = replace(
            self.launch,
            config=with_values(self.config, dict(mend.values)),
            stated=self.launch.stated | frozenset(mend.values),
        )
        unset = {name for name, value in mend.environment.items() if value is None}
        environment = {name: value for name, value in self.environment.items() if name not in unset}
        environment |= {name: value for name, value in mend.environment.items() if value is not None}
        return replace(self, launch=launch, environment=environment)

    def obeyed(self, mend: Mend) -> bool:
        """Whether `redline train` does what a mend says: no value is refused, no further rule is broken."""
        table = options_by_field()
        if any(table[name].refusal(value) is not None for name, value in mend.values.items()):
            return False
        now, then = (
            {problem.rule for problem in violations(each.config, explicit=each.launch.stated)}
            for each in (self, self.mended(mend))
            if each.launch is not None
        )
        return then <= now

    def saved(self, mend: Mend) -> float:
        """Share of the step time that a mend saves by the cost model; 0 where it cannot tell."""
        after = self.after(mend)
        if self.cost is None or after is None:
            return 0.0
        return 1 - after.step_s / self.cost.step_s

    def trifling(self, mend: Mend) -> bool:
        """Whether a mend is known to bring next to nothing, in time and in memory."""
        after = self.after(mend)
        if self.cost is None or after is None or self.hardware is None:
            return False
        saved_bytes = self.cost.memory.total - after.memory.total
        return self.saved(mend) < TRIFLE and saved_bytes < TRIFLE_BYTES * self.hardware.memory_bytes

    def fits(self, cost: StepCost | None) -> bool:
        """Whether a predicted step fits the device's memory."""
        return (
            cost is not None and self.hardware is not None and cost.memory.total <= self.hardware.memory_bytes
        )


def merge(mends: tuple[Mend, ...]) -> Mend:
    """Several mends as one, later ones winning."""
    values: dict[str, Any] = {}
    environment: dict[str, str | None] = {}
    drop: list[str] = []
    rename: dict[str, str] = {}
    for mend in mends:
        rename |= mend.rename
        values |= mend.values
        environment |= mend.environment
        drop += mend.drop
    return Mend(values=values, environment=environment, drop=tuple(dict.fromkeys(drop)), rename=rename)


def unstated(name: str, dialect: Dialect) -> Any:
    """The value of an option that is not stated."""
    option = options_by_field()[name]
    megatron = option.spec.megatron
    return option.default if dialect == "redline" or megatron is UNSET else megatron
