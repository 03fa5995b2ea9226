"""Metrics: the speed, the share of communication, and their file."""

import pytest
from helpers.plain_training import metrics_in

from axonmpi.train.report.metrics import HeldOutMetrics, StepMetrics, throughput
from axonmpi.train.report.recorder import Recorder


def test_metrics_are_lines_of_json(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("an earlier run\n")
    recorder = Recorder(tiny.replace(out=str(tmp_path)), writes=True)
    recorder.add(StepMetrics(1, 2.5, 1e-3, 0.5, 1000.0, 0.25, 0.1))
    assert metrics_in(tmp_path)[0]["loss"] == 2.5  # before the file is closed
    recorder.add(HeldOutMetrics(1, 2.0, 0.2))
    recorder.close()
    recorder.close()
    assert metrics_in(tmp_path)[1] == {"step": 1, "held_out_loss": 2.0, "seconds": 0.2}


def test_throughput():
    steps = [(1.0, 0.5)] * 10 + [(0.5, 0.1)] * 20
    assert throughput(steps[10:], 100) == pytest.approx((200.0, 0.2))
    assert throughput(steps, 100) == pytest.approx((30 * 100 / 20, 7 / 20))
    assert throughput([], 100) == (0.0, 0.0)
