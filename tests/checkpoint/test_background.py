"""A thread beside the program: its start and end, its value, and an error that the program is told once."""

import gc
import threading
import weakref

import pytest
from helpers.compare import refused

from axonmpi.checkpoint import background
from axonmpi.errors import CollectiveTimeoutError
from axonmpi.launch import exit as ends
from axonmpi.utils.waiting import Backoff, wait_until


@pytest.fixture(autouse=True)
def failed(monkeypatch):
    """The errors that nobody was told, apart from those of other tests."""
    monkeypatch.setattr(background, "_failed", set())
    return background._failed


@pytest.fixture
def end():
    """An event that calls wait for, at the latest until the test has failed."""
    event = threading.Event()
    yield event
    event.set()


def begun(call):
    work = background.Background(call, "the save")
    work.start()
    return work


def fail():
    raise OSError("disk full")


def test_a_call_runs_on_a_thread_of_its_own_that_the_process_waits_for(end):
    seen = []

    def call():
        seen.append(threading.current_thread())
        return end.wait()

    work = background.Background(call, "the save")
    assert (str(work), seen) == ("the save", [])
    work.start()
    wait_until(lambda: seen or work.done(), Backoff())
    assert (seen[0].name, seen[0].daemon, work.done()) == ("the save", False, False)
    refused(
        (CollectiveTimeoutError, ValueError),
        (lambda: work.wait(0), r"^the save is not complete after 0 s$"),
        (lambda: work.wait("soon"), "timeout: expected a number"),
    )
    work.check()  # nothing has failed yet, and it does not wait
    end.set()
    work.join()
    assert (work.done(), work.wait(), work.result()) == (True, None, True)


@pytest.mark.parametrize(
    ("how", "answer"), [("join", None), ("wait", None), ("settle", None), ("unraised", ""), ("result", True)]
)
def test_waiting_for_a_call(how, answer, end):
    work = begun(end.wait)
    threading.Timer(0.01, end.set).start()
    assert (getattr(work, how)(), work.done()) == (answer, True)


def test_a_call_is_forgotten_with_the_memory_that_it_holds():
    call = type("Call", (), {"__call__": lambda self: None})()
    work, reference = background.Background(call, "the save"), weakref.ref(call)
    del call
    work.start()
    work.join()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("disk full")])
@pytest.mark.parametrize("how", ["wait", "result", "check", "settle", "unraised"])
def test_an_error_is_told_once_but_for_those_who_ask(failed, how, error):
    def call():
        raise error

    work = begun(call)
    work.join()
    assert failed == {work}
    if how == "unraised":
        assert work.unraised() == "disk full"
    else:
        refused(type(error), (getattr(work, how), "disk full"))
    assert (failed, work.unraised()) == (set(), "")
    for raises_nothing in (work.check, work.settle, background._raise_at_the_end):
        raises_nothing()
    refused(type(error), (work.wait, "disk full"), (work.result, "disk full"))


def test_an_error_that_a_caller_claims_is_left_to_wait(failed):
    work = begun(fail)
    work.claim()
    work.settle()
    work.check()
    assert failed == {work}
    assert work.unraised() == ""
    refused(OSError, (work.wait, "disk full"))


def test_the_end_of_the_program_tells_an_error_that_nobody_was_told(failed):
    assert background._raise_at_the_end in ends._before_finalize
    background._raise_at_the_end()  # nothing has failed
    begun(fail).join()
    refused(OSError, (background._raise_at_the_end, "disk full"))
    assert failed == set()
