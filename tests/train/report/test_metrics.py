"""What is measured: time in communication, speed, and the file of both."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import pytest
from helpers.plain_training import metrics_in

import axonmpi as ax
from axonmpi.train.report import metrics
from axonmpi.train.report.metrics import CommunicationClock, HeldOutMetrics, Speedometer, StepMetrics
from axonmpi.train.report.recorder import Recorder


@pytest.fixture
def ticks(monkeypatch):
    """A clock that shows one second more each time that it is looked at."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_waiting_for_another_rank_counts_as_communication(ticks):
    has_entered, seconds = threading.Event(), [1.0, 3.5]
    ticks.perf_counter = lambda: (has_entered.set(), seconds[0])[1]

    def rank(world):
        with CommunicationClock(world.default_group.backend) as clock:
            if world.rank:
                has_entered.wait()
                del seconds[0]
            world.default_group.barrier()
        return clock.seconds

    assert ax.testing.run_ranks(2, rank) == [2.5, 0.0]


def test_operations_of_other_threads_do_not_count_and_those_inside_others_once(ticks):
    backend, inner = (ax.ProcessGroup.mock().backend for _ in range(2))
    inner.observer = Mock()
    with CommunicationClock(backend, inner) as clock:
        backend.observer.enter("wait", 0)
        with ThreadPoolExecutor() as other_thread:
            other_thread.submit(lambda: (clock.enter("all_reduce", 8), clock.leave("all_reduce"))).result()
        for observer, operation in ((backend.observer, "send"), (inner.observer, "recv")):
            observer.enter(operation, 8)
            observer.leave(operation)
        assert clock.seconds == 0.0
        backend.observer.leave("wait")
        assert clock.seconds == 1.0


def test_an_observer_that_was_there_before_hears_everything_and_comes_back():
    group, listener = ax.ProcessGroup.mock(), Mock()
    group.backend.observer = listener
    with CommunicationClock(group.backend):
        group.barrier()
    assert listener.mock_calls == [call.enter("barrier", ANY), call.leave("barrier")]
    assert group.backend.observer is listener


def test_several_communicators_are_added_up(ticks):
    groups = [ax.ProcessGroup.mock() for _ in range(3)]
    with CommunicationClock(*(group.backend for group in groups)) as clock:
        for number, group in enumerate(groups):
            assert clock.seconds == number
            group.barrier()
            ticks.perf_counter()  # computing does not count
    assert clock.seconds == 3.0
    assert all(group.backend.observer is None for group in groups)


def test_metrics_are_lines_of_json(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("an earlier run\n")
    recorder = Recorder(tiny.replace(out=str(tmp_path)), writes=True)
    recorder.add(StepMetrics(1, 2.5, 1e-3, 0.5, 1000.0, 0.25, 0.1))
    assert metrics_in(tmp_path)[0]["loss"] == 2.5  # before the file is closed
    recorder.add(HeldOutMetrics(1, 2.0, 0.2))
    recorder.close()
    recorder.close()
    assert metrics_in(tmp_path)[1] == {"step": 1, "held_out_loss": 2.0, "seconds": 0.2}


def test_speed_is_averaged_over_the_last_steps_and_over_all():
    speed = Speedometer(tokens=100)
    for _ in range(10):
        speed.add(1.0, 0.5)
    for _ in range(20):
        speed.add(0.5, 0.1)
    assert speed.recent() == pytest.approx((200.0, 0.2))
    assert speed.overall() == pytest.approx((30 * 100 / 20, 7 / 20))
