"""A trace of real steps on this CPU, its account in a run's folder, and what the doctor says of it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from redline.cli.doctor import main
from redline.ledger import Reference, write_account
from redline.ledger.take import take_account
from redline.ledger.trace import read_trace

STEPS = 3


def traced(path: Path) -> Path:
    """The trace of a few training steps of a small layer on the CPU."""
    layer = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(layer.parameters())
    x_TH = torch.randn(256, 128)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                layer(x_TH).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    run.export_chrome_trace(str(path))
    return path


def test_a_cpus_run_and_its_ledger(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    records = [
        {"kind": "step", "step": number, "step_time_s": 0.01, "tokens_per_s": 100.0, "mfu": 0.05, "loss": 1.0}
        for number in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps({"hardware": {"name": "a CPU", "kind": "cpu"}}))
    (folder / "config.toml").write_text(
        "[model]\nnum_layers = 2\nhidden_size = 128\nnum_attention_heads = 2\nvocab_size = 256\n"
        "[train]\nseq_length = 64\nmicro_batch_size = 2\n"
    )
    account = take_account(read_trace(traced(tmp_path / "trace.json")), Reference(peak_flops_per_s=1e12))
    write_account(folder / "ledger.json", account)
    main([str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    losses = document["verdict"]["losses"]
    assert losses and abs(sum(each["share_of_loss"] for each in losses) - 1) < 1e-6
    assert {"gemm", "optimizer"} <= {each["cause"] for each in losses}
    assert losses == sorted(losses, key=lambda each: -each["share_of_loss"])
    failed = {each["id"] for each in document["findings"]}
    assert "RL704" in failed and all(set(each["checks"]) <= failed for each in losses)
    main([str(folder)])
    report = capsys.readouterr().out
    assert "measured on a CPU" in report and "Where the loss is" in report
    assert "predicted MFU" not in report
    assert "a profiled run shows" not in report  # the ledger bounds each finding that it speaks of
