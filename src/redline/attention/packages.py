"""The packages that carry FlashAttention: which are installed, and the functions of versions 3 and 2.

Both register operators of their own, so torch.compile traces through them; version 4 is wrapped in flash4.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from redline.attention.flash4 import flash4_attention
from redline.attention.spec import Attention, AttentionDropout, MaskSpec, Request, check_shapes


class Package(NamedTuple):
    """One way to FlashAttention.

    Attributes:
        version: 4, 3 or 2.
        distribution: as it is installed.
        module: what is imported.
        attention: makes the backend's function, which also takes `deterministic`, of the imported module.
        sinks: whether it takes them.
    """

    version: int
    distribution: str
    module: str
    attention: Callable[[Any], Callable[..., Tensor]]
    sinks: bool = False

    @property
    def name(self) -> str:
        """The package with its release."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return self.distribution


def _by_function(
    interface: Any,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    dropout: AttentionDropout | None = None,
    softcap: float = 0.0,
    sink_N: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """The interface that versions 3 and 2 share. They return new tensors in their own order [B, S, N, D]."""
    assert dropout is None and sink_N is None and mask.segment_ids_BS is None, "select_backend refuses these"
    check_shapes(q_SBND, k_SBGD, v_SBGD, mask)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": mask.causal,
        "window_size": mask.limits if mask.window is not None else (-1, -1),
        "softcap": softcap,
        "deterministic": deterministic,
    }
    if mask.cu_seqlens is None:
        parts = (each.transpose(0, 1) for each in (q_SBND, k_SBGD, v_SBGD))
        return _first(interface.flash_attn_func(*parts, **options)).transpose(0, 1)
    documents = {
        "cu_seqlens_q": mask.cu_seqlens,
        "cu_seqlens_k": mask.cu_seqlens,
        "max_seqlen_q": mask.max_seqlen,
        "max_seqlen_k": mask.max_seqlen,
    }
    parts = (each[:, 0] for each in (q_SBND, k_SBGD, v_SBGD))
    return _first(interface.flash_attn_varlen_func(*parts, **documents, **options)).unsqueeze(1)


def _first(result: Any) -> Tensor:
    """Some releases return the log-sum-exp beside the output."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _of_interface(interface: Any) -> Callable[..., Tensor]:
    return functools.partial(_by_function, interface)


PACKAGES = (
    Package(4, "flash-attn-4", "flash_attn.cute", lambda _: flash4_attention, sinks=True),
    Package(3, "flash-attn-3", "flash_attn_3.flash_attn_interface", _of_interface),
    Package(3, "flash-attn-3", "flash_attn_interface", _of_interface),
    Package(2, "flash-attn", "flash_attn.flash_attn_interface", _of_interface),
)


@functools.cache
def why_not_installed(package: Package) -> str | None:
    """Why this package cannot be imported, or None."""
    try:
        found = importlib.util.find_spec(package.module) is not None
    except ImportError:
        found = False
    if not found:
        return f"{package.distribution} is not installed"
    try:
        importlib.import_module(package.module)
    except Exception as error:  # a package that does not fit this PyTorch or driver fails in many ways
        told = str(error).splitlines()[0] if str(error) else repr(error)
        return f"{package.distribution} does not import: {told}"
    return None


def refusal(package: Package, request: Request) -> str | None:
    """What this package is known to lack for `request`, or None. Whether it really runs is seen by trying."""
    if reason := why_not_installed(package):
        return reason
    if request.dropout:
        return "it draws dropout from a generator and cannot take the run's dropout keys"
    if request.segments:
        return "it knows documents that lie packed in one row, not segment ids"
    if request.sinks and not package.sinks:
        return f"{package.name} takes no attention sinks"
    return None


def bound(package: Package, request: Request) -> Attention:
    """The package as a backend. It is imported here: inside a step, torch.compile could not trace that."""
    attention = package.attention(importlib.import_module(package.module))
    return functools.partial(attention, deterministic=True) if request.deterministic else attention
