"""The worker thread: order, values, errors, waiting, and how it ends."""

import gc
import sys
import threading
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
from helpers.compare import refused

from axonmpi import CollectiveTimeoutError
from axonmpi.backends.worker import Worker
from axonmpi.utils.waiting import Backoff, is_beside_computation, wait_until

HANG = 600.0
"""Seconds that only a hang reaches."""


@pytest.fixture
def worker():
    made = Worker("under test")
    yield made
    assert made.close(HANG)


@pytest.fixture
def gate():
    return threading.Event()


def test_tasks_run_one_after_the_other_in_order(worker) -> None:
    running = threading.Lock()
    seen: list[int] = []

    def task(number: int) -> int:
        assert running.acquire(blocking=False)
        seen.append(number)
        running.release()
        return number

    works = [worker.submit("task", partial(task, number)) for number in range(50)]
    assert [work.result() for work in works] == list(range(50)) == seen


def test_the_thread_starts_with_the_first_task_and_ends_with_the_worker() -> None:
    worker = Worker("lazy")
    assert "lazy" not in [thread.name for thread in threading.enumerate()]
    thread = worker.submit("task", threading.current_thread).result()
    assert (thread.name, worker.close(HANG), thread.is_alive()) == ("lazy", True, False)
    assert Worker("without a task").close(0.0)


def fail() -> None:
    raise KeyError("lost")


def test_errors_are_raised_by_whoever_waits(worker) -> None:
    work = worker.submit("task", fail)
    assert (worker.submit("task", lambda: "fine").result(), work.done()) == ("fine", True)
    refused(KeyError, *((ask, "lost") for ask in (work.wait, work.result, work.wait)))


def test_waiting_has_a_limit_and_can_be_repeated(worker, gate) -> None:
    work = worker.submit("all_reduce(float32 [3], SUM)", gate.wait)
    words = r"all_reduce\(float32 \[3\], SUM\) was not complete after"
    refused(CollectiveTimeoutError, *((partial(work.wait, limit), words) for limit in (0.01, 0, -1.0)))
    assert not work.done()
    gate.set()
    work.wait(1e12)
    work.wait(float("inf"))
    assert work.done()
    work.wait(0)


def test_busy_until_the_last_task_has_ended(worker, gate) -> None:
    assert not worker.busy
    works = [worker.submit("task", gate.wait) for _ in range(2)]
    assert worker.busy
    gate.set()
    for work in works:
        work.wait()
    assert not worker.busy


def test_closing_runs_what_is_queued(worker, gate) -> None:
    seen: list[int] = []
    works = [worker.submit("task", gate.wait)]
    works += [worker.submit("task", partial(seen.append, number)) for number in range(3)]
    assert not worker.close(0.01)
    gate.set()
    assert worker.close(HANG)
    assert ([work.done() for work in works], works[0].result(), seen) == ([True] * 4, True, [0, 1, 2])
    assert worker.close(0.0)


def test_a_task_that_submits_runs_it_at_once_and_may_wait_for_one_behind(worker, gate) -> None:
    order: list[str] = []

    def outer() -> None:
        gate.wait(HANG)
        worker.submit("inner", lambda: order.append("inner")).wait()
        behind[0].wait()
        order.append("outer")

    first = worker.submit("outer", outer)
    behind = [worker.submit("behind", lambda: order.append("behind"))]
    gate.set()
    first.wait(HANG)
    assert (order, worker.busy) == (["inner", "behind", "outer"], False)


def test_a_task_cannot_wait_for_itself(gate) -> None:
    worker = Worker("waits for itself")
    works = []

    def waits() -> None:
        gate.wait(HANG)
        works[0].wait()

    works.append(worker.submit("waits", waits))
    gate.set()
    assert worker.close(HANG)
    refused(RuntimeError, (works[0].wait, "waits cannot be waited for by what it runs itself"))


def test_what_a_task_holds_is_freed_when_it_has_ended(worker) -> None:
    held = threading.Event()
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


def test_waiting_is_observed_and_being_there_already_is_not(worker, gate) -> None:
    events: list[object] = []

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


def test_a_task_is_told_whether_its_rank_computes_or_waits_for_it(worker, gate) -> None:
    def task() -> bool:
        before = is_beside_computation()
        gate.set()
        return before and wait_until(lambda: not is_beside_computation(), Backoff(), HANG)

    work = worker.submit("task", task)
    assert (gate.wait(HANG), work.result(), is_beside_computation()) == (True, True, False)
