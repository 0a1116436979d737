"""Config and hardware turned into one frozen Plan that everything else runs by. Pure, no torch."""

from redline.plan.batch import START, BatchSchedule, Reached, Segment, make_batch_schedule, ramp_up
from redline.plan.communication import Setting, complaints, wanted_settings
from redline.plan.dtypes import choose_precision, state_dtypes
from redline.plan.grid import RankGrid, make_grid
from redline.plan.kernels import Conditions, KernelChoice, choose_kernels
from redline.plan.lr import LrSchedule, ScheduleSpec, WeightDecaySchedule
from redline.plan.plan import EvalPlan, Plan, make_plan

__all__ = [
    "START",
    "BatchSchedule",
    "Conditions",
    "EvalPlan",
    "KernelChoice",
    "LrSchedule",
    "Plan",
    "RankGrid",
    "Reached",
    "ScheduleSpec",
    "Segment",
    "Setting",
    "WeightDecaySchedule",
    "choose_kernels",
    "choose_precision",
    "complaints",
    "make_batch_schedule",
    "make_grid",
    "make_plan",
    "ramp_up",
    "state_dtypes",
    "wanted_settings",
]
