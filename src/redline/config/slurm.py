"""What Slurm tells each of its tasks, in the variables that torchrun would have set."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, NUM_PORTS = 20000, 20000  # a port of its own for each job of a node


def ranks_from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of an `srun` task.

    Empty outside a task of several, and where a launcher has set RANK already. The batch script itself is no
    task: SLURM_STEP_NUM_TASKS is not set there. What the user sets (MASTER_PORT, say) goes before.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in env or not tasks.isdecimal() or int(tasks) < 2 or "SLURM_PROCID" not in env:
        return {}
    digits = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or "0"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": tasks_here(
            env.get("SLURM_STEP_TASKS_PER_NODE", ""), int(env.get("SLURM_NODEID", "0"))
        ),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(FIRST_PORT + int(digits) % NUM_PORTS),
    }
    return found | {name: env[name] for name in found if name in env}


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: "gpu[007-010,12],x1" -> "gpu007"."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def tasks_here(per_node: str, node: int) -> str:
    """Tasks on node number `node` of a Slurm list: "4(x2),3" -> 4, 4, 3; "1" where it is not known."""
    counts: list[str] = []
    for part in per_node.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [match[1]] * int(match[2] or 1)
    return counts[node] if node < len(counts) else "1"
