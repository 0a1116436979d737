"""When a window of a profile ends."""

from __future__ import annotations

from unittest import mock

from redline.step.profile import StepProfiler, Window


def test_nothing_travels_any_more_when_a_tracer_ends() -> None:
    """Threads of gloo write the end of a gather into it; a step that failed may wait for nobody."""
    step, capture = mock.Mock(), mock.Mock(warmup=0)
    step.state.optimizer.settle.side_effect = lambda: capture.settled()
    profiler = StepProfiler(step, [Window(1, 1, capture), Window(3, 4, capture)])
    with mock.patch("redline.step.profile.marked"):
        with profiler.turn(1):
            pass
        assert [call[0] for call in capture.method_calls] == ["start", "settled", "stop"]
        with profiler.turn(3):
            pass
        profiler.abandon()
    assert [call[0] for call in capture.method_calls[3:]] == ["start", "stop"]
    profiler.close()
    assert len(capture.method_calls) == 5, "no window is open, so nothing is waited for"
