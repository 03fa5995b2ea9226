"""The worker thread: order, values, errors, waiting, and how it ends."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import contextmanager

import pytest

from axonmpi import CollectiveTimeoutError
from axonmpi.backends.worker import Worker
from axonmpi.utils.waiting import Backoff, is_beside_computation, wait_until


@pytest.fixture
def worker():
    made = Worker("under test")
    yield made
    assert made.close(10.0)


def test_tasks_run_one_after_the_other_in_order(worker) -> None:
    seen: list[int] = []
    running = threading.Lock()

    def task(number: int) -> int:
        assert running.acquire(blocking=False)
        seen.append(number)
        running.release()
        return number

    works = [worker.submit("task", lambda number=number: task(number)) for number in range(50)]
    assert [work.result() for work in works] == list(range(50)) == seen


def test_the_thread_starts_with_the_first_task() -> None:
    before = threading.active_count()
    worker = Worker("lazy")
    assert threading.active_count() == before
    assert worker.close(1.0)
    worker = Worker("lazy")
    assert worker.submit("task", threading.current_thread).result().name == "lazy"
    assert worker.close(10.0)
    assert threading.active_count() == before


def fail() -> None:
    raise KeyError("lost")


def test_errors_are_raised_by_whoever_waits(worker) -> None:
    work = worker.submit("task", fail)
    assert worker.submit("task", lambda: "fine").result() == "fine"
    assert work.done()
    for ask in (work.wait, work.result, work.wait):
        with pytest.raises(KeyError, match="lost"):
            ask()


def test_waiting_has_a_limit_and_can_be_repeated(worker) -> None:
    gate = threading.Event()
    work = worker.submit("all_reduce(float32 [3], SUM)", gate.wait)
    for limit in (0.01, 0, -1.0):
        with pytest.raises(
            CollectiveTimeoutError, match=r"all_reduce\(float32 \[3\], SUM\) was not complete after"
        ):
            work.wait(limit)
    assert not work.done()
    gate.set()
    work.wait(1e12)
    work.wait(float("inf"))
    assert work.done()
    work.wait(0)


def test_busy_until_the_last_task_has_ended(worker) -> None:
    gate = threading.Event()
    assert not worker.busy
    works = [worker.submit("task", gate.wait) for _ in range(2)]
    assert worker.busy
    gate.set()
    for work in works:
        work.wait()
    assert not worker.busy


def test_closing_runs_what_is_queued(worker) -> None:
    gate = threading.Event()
    seen: list[int] = []
    worker.submit("task", gate.wait)
    works = [worker.submit("task", lambda number=number: seen.append(number)) for number in range(3)]
    assert not worker.close(0.01)
    gate.set()
    assert worker.close(10.0)
    assert seen == [0, 1, 2]
    assert all(work.done() for work in works)
    assert worker.close(1.0)


def test_what_a_task_holds_is_freed_when_it_has_ended(worker) -> None:
    class Large:
        pass

    held = Large()
    watched = weakref.ref(held)
    work = worker.submit("task", lambda held=held: None)
    del held
    work.wait()
    gc.collect()
    assert watched() is None


@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
def test_an_error_that_nobody_waits_for_is_not_silent(worker, monkeypatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: reported.append(event.exc_value))
    worker.submit("task", fail)
    worker.submit("task", int).wait()
    gc.collect()
    assert [str(error) for error in reported] == ["'lost'"]


def test_waiting_is_observed_and_being_there_already_is_not(worker) -> None:
    gate, events = threading.Event(), []

    @contextmanager
    def waiting(gives_up):
        events.append(gives_up)
        try:
            yield
        finally:
            events.append("ends")

    work = worker.submit("task", gate.wait, waiting)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.01)
    gate.set()
    worker.submit("task", int).wait()
    work.wait()
    assert events == [True, "ends"]


def test_a_task_is_told_whether_its_rank_computes_or_waits_for_it(worker) -> None:
    begun = threading.Event()

    def task() -> bool:
        before = is_beside_computation()
        begun.set()
        return before and wait_until(lambda: not is_beside_computation(), Backoff(), 10.0)

    work = worker.submit("task", task)
    assert begun.wait(10.0)
    assert work.result()
    assert not is_beside_computation()


def test_a_worker_ends_after_what_is_under_way() -> None:
    gate = threading.Event()
    worker = Worker("ending")
    work = worker.submit("first", gate.wait)
    assert not worker.close(0.05)
    gate.set()
    assert worker.close(10.0)
    assert work.result() is True
