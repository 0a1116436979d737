"""FlashAttention: the newest package that takes the run, else the kernel that PyTorch carries."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch.nn.attention import SDPBackend

from redline.attention.packages import PACKAGES, bound, refusal
from redline.attention.probe import probe
from redline.attention.sdpa import common_reason, sdpa
from redline.attention.spec import HALF_DTYPES, Attention, Request, name_of

flash_attention = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)  # PyTorch's, for a GPU or a CPU


class Found(NamedTuple):
    """What `flash` means for a request: a function and its name, or only the reasons why there is none."""

    attention: Attention | None
    what: str


@functools.lru_cache(maxsize=64)
def find(request: Request) -> Found:
    """The newest package that takes `request`, of `request.flash_version` where it is given."""
    reasons = []
    on_gpu = request.device_type == "cuda"
    if on_gpu and request.dtype not in HALF_DTYPES:
        return Found(None, f"on a GPU it computes in fp16 and bf16, not in {name_of(request.dtype)}")
    for package in PACKAGES:
        if request.flash_version not in (None, package.version):
            continue
        reason = refusal(package, request) if on_gpu else f"{package.distribution} needs an NVIDIA GPU"
        if reason is None and (told := probe(bound(package, request), request)):
            reason = f"{package.name} refuses it: {told}"
        if reason is None:
            return Found(bound(package, request), package.name)
        reasons.append(reason)
    if request.flash_version is not None:
        return Found(None, "; ".join(dict.fromkeys(reasons)))
    reason = common_reason(request)
    if reason is None and (told := probe(flash_attention, request)):
        reason = f"PyTorch refuses it: {told}"
    if reason is None:
        return Found(flash_attention, "PyTorch's flash kernel")
    installed = [each for each in reasons if not each.endswith(("is not installed", "needs an NVIDIA GPU"))]
    return Found(None, "; ".join([*installed, reason]))


def supports(request: Request) -> str | None:
    """Why no FlashAttention here can take `request`, or None."""
    found = find(request)
    return found.what if found.attention is None else None
