"""Where weight gradients go, and what that costs.

First every linear of two models: the gradient added inside its GEMM, beside a GEMM and an addition. Then
whole steps on one device: flat buffers beside a plain loop, whose parameters are tensors of their own, with
`.grad` by autograd, a list of fp32 copies, and PyTorch's clipping and fused AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redline.config import Environment, parse_args
from redline.data import Microbatch
from redline.model import Transformer
from redline.model.gemm import add_wgrad
from redline.run import OpenRun, open_run
from redline.step.forward import microbatch_loss

# site -> (rows, columns) of the weight
SHAPES = {
    "1B": {
        "qkv": (3072, 2048),
        "proj": (2048, 2048),
        "fc1": (16384, 2048),
        "fc2": (2048, 8192),
        "head": (128256, 2048),
    },
    "8B": {
        "qkv": (6144, 4096),
        "proj": (4096, 4096),
        "fc1": (28672, 4096),
        "fc2": (4096, 14336),
        "head": (128256, 4096),
    },
}
SMALL_SHAPES = {"tiny": {"qkv": (96, 32), "fc2": (32, 128)}}
TOKENS = {"cuda": 8192, "cpu": 64}
ROUNDS, WARMUP = 10, 2
STEPS, WARMUP_STEPS = 6, 3
RUN = {
    "cuda": "--preset llama3.2-1b --num-layers 8 --seq-length 4096 --micro-batch-size 2 "
    "--global-batch-size 4 --bf16",
    "cpu": "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 101 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 2 --bf16 --hidden-dropout 0 --attention-dropout 0",
}


def bench_gemm(
    environment: Environment, *, device_type: str, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """A row a linear, then one for each kind of step."""
    device = torch.device(device_type)
    rows = []
    for model, sites in (SHAPES if device_type == "cuda" else SMALL_SHAPES).items():
        for site, (out, size) in sites.items():
            rows.append(_linear(f"{model} {site}", out, size, device))
            say(
                f"{rows[-1]['case']}: fused {rows[-1]['fused_s'] * 1e3:.3g} ms, "
                f"apart {rows[-1]['apart_s'] * 1e3:.3g} ms: {rows[-1]['apart_over_fused']:.3f}"
            )
    return [*rows, *_steps(environment, device_type, say)]


def _linear(case: str, out: int, size: int, device: torch.device) -> dict[str, Any]:
    tokens = TOKENS[device.type]
    x_TI = torch.randn(tokens, size, device=device, dtype=torch.bfloat16)
    dy_TO = torch.randn(tokens, out, device=device, dtype=torch.bfloat16)
    grad_OI = torch.zeros(out, size, device=device)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS + WARMUP):
        for fuse in (True, False):
            took = _timed(device, partial(add_wgrad, grad_OI, dy_TO, x_TI, fuse))
            if number >= WARMUP:
                times[fuse].append(took)
    fused, apart = (statistics.median(times[fuse]) for fuse in (True, False))
    return {
        "case": case,
        "tokens": tokens,
        "weight": [out, size],
        "fused_s": fused,
        "apart_s": apart,
        "apart_over_fused": apart / fused,
    }


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of `run` on the device."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _steps(environment: Environment, device_type: str, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Seconds of a step by flat buffers, and by the plain loop over the same model and batches."""
    words = f"{RUN[device_type]} --device {device_type} --mock-data --eval-iters 0"
    words += f" --train-iters {STEPS + WARMUP_STEPS}"
    run, other = (open_run(parse_args(words.split()), environment, lambda _: None) for _ in range(2))
    with closing(run.batches()) as stream:
        batches = [list(microbatches) for microbatches in stream]
    plain = PlainLoop(other)
    step = run.make_step()
    turns: dict[str, Callable[[list[Microbatch]], float]] = {"plain": plain, "flat": lambda it: step(it).loss}
    times = dict[str, list[float]](plain=[], flat=[])
    losses = dict[str, list[float]](plain=[], flat=[])
    for number, batch in enumerate(batches):
        for name, turn in turns.items():
            begin = time.perf_counter()
            losses[name].append(turn(batch))  # a number: the device is waited for
            if number >= WARMUP_STEPS:
                times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(found) for name, found in times.items()}
    say(
        f"step of {words.split(' --seq')[0]}: flat buffers {medians['flat'] * 1e3:.4g} ms, "
        f"plain loop {medians['plain'] * 1e3:.4g} ms: {medians['plain'] / medians['flat']:.3f}"
    )
    row = {"case": "step", "words": words, "flat_s": medians["flat"], "plain_s": medians["plain"]}
    row |= {"plain_over_flat": medians["plain"] / medians["flat"], "losses": losses}
    return [row]


class PlainLoop:
    """One optimizer step in PyTorch's own means: call it with a batch.

    Args:
        run: of half-precision parameters, at its first step. Its model is taken out of its flat buffers.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run, options = run, run.config.optim
        self._model = run.state.model
        _free_parameters(self._model)
        self._params = [each for each in self._model.parameters() if each.requires_grad]
        self._main = [nn.Parameter(each.detach().float()) for each in self._params]
        self._clip = options.clip_grad
        self._adam = torch.optim.AdamW(
            self._main,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._samples = 0

    def __call__(self, batch: Sequence[Microbatch]) -> float:
        """The mean loss."""
        tokens = sum(int(each.loss_mask_BS.count_nonzero()) for each in batch)
        weight = torch.full((), 1 / tokens, device=self._run.device)
        total = torch.zeros((), device=self._run.device)
        for each in batch:
            loss = microbatch_loss(self._model, each.to(self._run.device, non_blocking=True), weight, None)
            loss.backward()
            total += loss.detach()
        for main, param in zip(self._main, self._params, strict=True):
            assert param.grad is not None
            main.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self._main, self._clip, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = self._run.schedules.lr(self._samples)
        self._adam.step()
        torch._foreach_copy_(_data(self._params), _data(self._main))
        self._samples += sum(each.num_samples for each in batch)
        return float(total)


def _data(params: Iterable[Tensor]) -> list[Tensor]:
    return [each.data for each in params]


def _free_parameters(model: Transformer) -> None:
    """Give the model parameters that lie in no buffer and have no `main_grad`; tied ones stay one."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param not in fresh:
                fresh[param] = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            setattr(module, name, fresh[param])
