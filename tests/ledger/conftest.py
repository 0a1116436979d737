"""Records with sensible values."""

import pytest

from redline.ledger import StepRecord


@pytest.fixture
def record():
    def make(step, **values):
        facts = {
            "loss": 3.0,
            "lr": 1e-3,
            "grad_norm": 1.5,
            "tokens_per_s": 1000.0,
            "step_time_s": 0.5,
            "memory": 1 << 20,
            "consumed_samples": 8 * step,
            "global_batch_size": 8,
        }
        return StepRecord(step=step, **(facts | values))

    return make
