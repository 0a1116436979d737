"""The numbers of metrics.jsonl elsewhere: Prometheus over HTTP, Weights & Biases through its package."""

import sys
import types
import urllib.error
import urllib.request

import pytest

from redline.errors import ConfigError, TrainingError
from redline.ledger import open_ledger
from redline.ledger.prometheus import PrometheusServer
from redline.ledger.wandb import WandbWriter

WANDB = {"entity": None, "name": "run", "config": {"train": {"seed": 1}}}


def get(server: PrometheusServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_prometheus_gets_the_newest_of_every_number(tmp_path, record) -> None:
    server = PrometheusServer("127.0.0.1", 0, {"run": 'a "b"'})
    with open_ledger(tmp_path / "run", sinks=[server]) as ledger:
        assert get(server) == "\n"
        ledger.record(record(1, loss=3.5))
        ledger.record(record(2, loss=2.5, loss_scale=float("inf")))
        text = get(server)
        lines = text.splitlines()
        assert "# TYPE redline_train_loss gauge" in lines
        assert 'redline_train_loss{run="a \\"b\\""} 2.5' in lines
        assert 'redline_train_step{run="a \\"b\\""} 2.0' in lines
        with pytest.raises(urllib.error.HTTPError):
            get(server, "/elsewhere")
    with pytest.raises(urllib.error.URLError):  # closed with the ledger
        get(server)


def test_a_port_in_use_is_said_plainly() -> None:
    server = PrometheusServer("127.0.0.1", 0, {})
    try:
        with pytest.raises(ConfigError, match=f"--prometheus-port {server.port}: cannot listen"):
            PrometheusServer("127.0.0.1", server.port, {})
    finally:
        server.close()


def test_wandb_gets_every_step(tmp_path, record, monkeypatch) -> None:
    said = []

    class Run:
        def log(self, values, step):
            said.append((step, values["train/loss"]))

        def finish(self):
            said.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **options: said.append(options["project"]) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_ledger(tmp_path / "run", sinks=[WandbWriter("p", folder=tmp_path / "w", **WANDB)]) as ledger:
        ledger.record(record(1, loss=3.5))
        ledger.record(record(2, loss=2.5))
    assert said == ["p", (1, 3.5), (2, 2.5), "finished"]


def test_wandb_is_missed_and_refusing_plainly(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs the wandb package") as caught:
        WandbWriter("p", folder=tmp_path, **WANDB)
    assert "pip install wandb" in str(caught.value)
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: (_ for _ in ()).throw(RuntimeError("no login"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(TrainingError, match="no login"):
        WandbWriter("p", folder=tmp_path, **WANDB)
