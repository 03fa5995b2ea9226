"""A thread beside the program: its start and end, its value, and an error that the program is told once."""

import gc
import threading
import weakref

import pytest

from axonmpi.checkpoint import background
from axonmpi.checkpoint.background import Background
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
    work = Background(call, "the save")
    work.start()
    return work


def failing():
    raise OSError("disk full")


def test_a_call_runs_on_a_thread_of_its_own_that_the_process_waits_for(end):
    seen = []

    def call():
        seen.append(threading.current_thread())
        return end.wait()

    work = Background(call, "the save")
    assert (str(work), seen) == ("the save", [])
    work.start()
    wait_until(lambda: seen or work.done(), Backoff())
    assert (seen[0].name, seen[0].daemon, work.done()) == ("the save", False, False)
    with pytest.raises(CollectiveTimeoutError, match=r"^the save is not complete after 0 s$"):
        work.wait(0)
    with pytest.raises(ValueError, match="timeout: expected a number"):
        work.wait("soon")
    work.check()  # nothing has failed yet, and it does not wait
    end.set()
    work.join()
    assert work.done()
    assert work.wait() is None
    assert work.result() is True


@pytest.mark.parametrize("how", ["join", "wait", "settle", "untold", "result"])
def test_waiting_for_a_call(how, end):
    work = begun(end.wait)
    timer = threading.Timer(0.01, end.set)
    timer.start()
    assert getattr(work, how)() == {"untold": "", "result": True}.get(how)
    assert work.done()
    timer.join()


def test_a_call_is_forgotten_with_the_memory_that_it_holds():
    class Held:
        def __call__(self):
            pass

    work = Background(held := Held(), "the save")
    reference = weakref.ref(held)
    del held
    work.start()
    work.join()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("disk full")])
@pytest.mark.parametrize("how", ["wait", "result", "check", "settle", "untold"])
def test_an_error_is_told_once_but_for_those_who_ask(failed, how, error):
    def fails():
        raise error

    work = begun(fails)
    work.join()
    assert failed == {work}
    if how == "untold":
        assert work.untold() == "disk full"
    else:
        with pytest.raises(type(error), match="disk full"):
            getattr(work, how)()
    assert failed == set()
    work.check()
    work.settle()
    background._tell_at_the_end()
    assert work.untold() == ""
    for asks in (work.wait, work.result):
        with pytest.raises(type(error), match="disk full"):
            asks()


def test_an_error_that_a_caller_claims_is_left_to_wait(failed):
    work = begun(failing)
    work.claim()
    work.settle()
    work.check()
    assert failed == {work}
    assert work.untold() == ""
    with pytest.raises(OSError, match="disk full"):
        work.wait()


def test_the_end_of_the_program_tells_an_error_that_nobody_was_told(failed):
    assert background._tell_at_the_end in ends._before_finalize
    background._tell_at_the_end()  # nothing has failed
    begun(failing).join()
    with pytest.raises(OSError, match="disk full"):
        background._tell_at_the_end()
    assert failed == set()
    background._tell_at_the_end()
