"""Whether two runs of the same options give the same bits, and what stands in the way."""

from __future__ import annotations

from redline.choice import Choice
from redline.formulas.operators import Operator

ATOMIC = "the gradient of the embedding is summed by atomic additions, in any order"
VARYING_BACKWARD = {
    "flash": "the backward of flash attention adds to the queries' gradient in any order",
    "fused": "PyTorch does not vouch for the backward of cuDNN's attention",
}


def determinism(
    deterministic: bool, device_type: str, attention: str, fused: frozenset[Operator] = frozenset()
) -> Choice:
    """What --deterministic-mode does on this device, or which operators vary without it.

    Args:
        attention: the backend that runs.
        fused: the operators that run as Redline's kernels, all of which add in a fixed order.
    """
    asked = "on" if deterministic else "off"
    if device_type == "cpu":
        return Choice("determinism", asked, "on", "a CPU gives the same bits for the same number of threads")
    if deterministic:
        why = f"sorted sums for the embedding, a deterministic backward of {attention} attention, cuBLAS too"
        return Choice("determinism", asked, "on", why)
    found = (None if "embedding" in fused else ATOMIC, VARYING_BACKWARD.get(attention))
    varying = [each for each in found if each]
    if not varying:
        why = "no operator of this run is known to vary, but only --deterministic-mode vouches for cuBLAS"
        return Choice("determinism", asked, "off", why)
    why = f"not the same bits every time: {'; '.join(varying)} (--deterministic-mode orders them)"
    return Choice("determinism", asked, "off", why)
