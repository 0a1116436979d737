"""All checks, in files by account. One function each; docs/doctor.md is printed from the list."""

from redline.doctor.checks import communication, flags, fp8, host, kernels, ledger, machine, memory
from redline.doctor.registry import Check

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            value
            for module in (kernels, fp8, communication, memory, host, machine, flags, ledger)
            for value in vars(module).values()
            if isinstance(value, Check)
        ),
        key=lambda each: each.id,
    )
)

__all__ = ["CHECKS"]
