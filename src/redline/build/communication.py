"""The variables that CUDA and NCCL read, set before either starts."""

from __future__ import annotations

import os

from redline.choice import Choice
from redline.config import Environment, RunConfig
from redline.plan import wanted_settings

ELASTIC = (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),)  # torch elastic sets it; no user did


def set_communication(config: RunConfig, environment: Environment) -> tuple[Choice, ...]:
    """Set what several processes of this layout need and the user has not set; what they now run under.

    Must run before the first CUDA call: CUDA counts its queues once.
    """
    if environment.world_size == 1:
        return ()
    given = environment.communication()
    if environment.agent_store:
        given = {name: value for name, value in given.items() if (name, value) not in ELASTIC}
    wanted = [setting for setting in wanted_settings(config) if setting.name not in given]
    os.environ.update({setting.name: setting.value for setting in wanted})
    ran = [f"{setting.name}={setting.value}" for setting in wanted]
    ran += [f"{name}={value} (as found)" for name, value in given.items()]
    if not ran:
        return ()
    why = "; ".join(f"{setting.name}: {setting.why}" for setting in wanted) or "as the user set them"
    return (Choice("communication environment", "auto", ", ".join(ran), why),)
