"""What an eager call of an operator costs the host: on tensors without rows, and with one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.bench.gate import draw
from redline.kernels.bench_case import BenchCase, Provider

HOST_ROUNDS, HOST_CALLS = 5, 200


def add_host_times(
    case: BenchCase, providers: dict[str, Provider], device: torch.device, rates: dict[str, dict[str, Any]]
) -> None:
    """Host time of each provider, without a row and with one, where it is below what `rates` knows of it.

    A run asks twice, minutes apart: for seconds at a time a shared machine's host is half as fast.
    """
    for name, provider in providers.items():
        if name == "compile":  # its first call at another size would compile anew
            continue
        for rows, field in ((0, "host_s"), (1, "host_one_row_s")):
            times = rates[name].get(field), host_seconds(case, name, provider, device, rows)
            rates[name][field] = min((each for each in times if each is not None), default=None)


def host_seconds(
    case: BenchCase, name: str, provider: Provider, device: torch.device, rows: int
) -> float | None:
    """Host time of an eager forward on tensors of so many rows; None where a provider fails on them.

    Without a row nothing is launched (but by providers that launch an empty grid); with one, everything is.
    The least of the rounds' medians: what a clock not yet raised or other jobs add is not the operator's.
    """
    try:
        inputs = case.inputs_of(name, (case.cut or cut)(draw(case, device), rows))
        for _ in range(10):
            provider(*inputs)
        rounds = [_median_seconds(partial(provider, *inputs)) for _ in range(HOST_ROUNDS)]
    except Exception:  # an empty grid, say: what matters then is the other providers' number
        return None
    return min(rounds)


def _median_seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    times = []
    for _ in range(HOST_CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times)


def cut(inputs: Sequence[Any], rows: int) -> tuple[Any, ...]:
    """The inputs with `rows` rows left: every tensor as long as the first one is cut to them.

    Beside one that is as wide as long a vector is taken for one of columns.
    """
    first = next((each for each in inputs if isinstance(each, Tensor) and each.dim()), None)
    if first is None:
        return tuple(inputs)
    square = first.dim() > 1 and first.shape[0] == first.shape[-1]

    def has_rows(each: Any) -> bool:
        long = isinstance(each, Tensor) and each.dim() > 0 and len(each) == len(first)
        return long and not (square and each.dim() == 1)

    return tuple(_cut(each, rows) if has_rows(each) else each for each in inputs)


def _cut(tensor: Tensor, rows: int) -> Tensor:
    found = tensor[:rows].detach().requires_grad_(tensor.requires_grad)
    return found if tensor.is_leaf else found.clone()  # no leaf and no view, as a GEMM's result
