"""Where a run's numbers go besides its folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from redline.config import RunConfig, to_dict
from redline.ledger.ledger import Sink
from redline.ledger.prometheus import PrometheusServer
from redline.ledger.wandb import WandbWriter
from redline.run.folder import RunFolder


def open_sinks(config: RunConfig, folder: RunFolder) -> list[Sink]:
    """Weights & Biases and Prometheus, where they were asked for.

    Raises: ConfigError or TrainingError when one cannot be opened; none is left open then.
    """
    options, sinks = config.logging, list[Sink]()
    name = folder.root.name
    with ExitStack() as opened:
        if options.prometheus_port is not None:
            server = PrometheusServer(options.prometheus_address, options.prometheus_port, {"run": name})
            opened.callback(server.close)
            sinks.append(server)
        if options.wandb_project is not None:
            sinks.append(
                WandbWriter(
                    options.wandb_project,
                    entity=options.wandb_entity,
                    name=options.wandb_exp_name or name,
                    folder=Path(options.wandb_save_dir or folder.root),
                    config=to_dict(config),
                )
            )
        opened.pop_all()
    return sinks
