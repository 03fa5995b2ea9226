"""The stacks of a process that another one asks for."""

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.limits import limit

from axonmpi.launch.topology import Topology
from axonmpi.observe import RankRecord, records_of, stacks, stacks_of, watch, watchdog
from axonmpi.record import files
from axonmpi.utils.waiting import Backoff, wait_until

# Python 3.12 and later: the child only runs Python
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def sleep() -> None:
    """Sleep beside threads that end all the time."""
    threading.Thread(target=end_threads, daemon=True).start()
    time.sleep(1000)


def end_threads(depth: int = 0) -> None:
    """Start threads with deep stacks, one after the other."""
    while depth == 0:
        thread = threading.Thread(target=end_threads, args=(200,))
        thread.start()
        thread.join()
    if depth > 1:
        end_threads(depth - 1)


def hold_the_lock() -> None:
    """Keep Python's lock in a deadlock, which no signal ends."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def run(function: Callable[[], None]) -> None:
    """Be a rank with a record, in a function."""
    assert not files.publish_record(files.make_folder(), "asked", asdict(Topology.of([0], 0)))
    watch(0)
    function()


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankRecord]:
    """The record of a process that is in the function of the parameter, and is there until the end."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    process = multiprocessing.get_context("fork").Process(target=run, args=(request.param,), daemon=True)
    process.start()
    assert wait_until(lambda: list(tmp_path.glob("*/*.ask")), Backoff(0, 0.01), limit(20))
    yield records_of("asked")[0]
    assert process.is_alive()
    process.kill()
    process.join()


@pytest.mark.parametrize("rank", [sleep], indirect=True)
def test_a_rank_whose_threads_end_all_the_time_can_be_asked(rank: RankRecord, monkeypatch: pytest.MonkeyPatch):
    """Whole each time. Threads that end while their stacks are read without the lock would end the process."""
    monkeypatch.setattr(stacks, "_SETTLE_SECONDS", 0.0)
    assert wait_until(lambda: "in sleep" in stacks_of([rank], limit=limit(20))[0], Backoff(), limit(20))
    for _ in range(100):
        assert "in sleep" in stacks_of([rank], limit=limit(20))[0]


def test_an_answer_that_is_written_in_parts_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be preempted within its answer; each nap of the reader lets it write the next part."""
    parts = [b"File one\n", b"", b"", b"File two\n\0"]

    def write(*_: object) -> None:
        with (tmp_path / "record.stacks").open("ab") as file:
            file.write(parts.pop(0))

    monkeypatch.setattr(stacks, "_ask", write)
    monkeypatch.setattr(Backoff, "rest", write)
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.0)  # the caller's limit holds, whatever the usual one is
    record = Mock(rank=3, path=tmp_path / "record", **{"word.return_value": 0})
    assert stacks_of([record], limit=limit(20)) == {3: "File one\nFile two"}


def test_the_thread_that_starts_the_watchdog_is_shown_and_the_watchdog_is_not(tmp_path: Path) -> None:
    """A rank can be asked from the moment that its watchdog listens, before the main thread has left `watch`."""
    watching, starting = (
        f'Thread 0x{number} (most recent call first):\n  File "/axonmpi/observe/watchdog.py", line 9 in {name}\n'
        for number, name in enumerate(("_watch", "watch"))
    )
    record = Mock(rank=3, path=tmp_path / "record", **{"word.return_value": 0})
    (tmp_path / "record.stacks").write_text("before")
    own = SimpleNamespace(
        write_stacks=lambda: (tmp_path / "record.stacks").write_text(f"before{watching}\n{starting}\0")
    )
    record.pid = os.getpid()
    assert stacks_of([record], own=own, limit=limit(20)) == {3: starting.strip()}


@pytest.mark.parametrize("rank", [hold_the_lock], indirect=True)
def test_a_rank_that_keeps_pythons_lock_answers_too(rank: RankRecord) -> None:
    assert wait_until(lambda: "in hold_the_lock" in stacks_of([rank], limit=0.2)[0], Backoff(), limit(20))


def test_a_rank_that_cannot_be_asked_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "gone" / "record"
    monkeypatch.setattr(watchdog, "own_record", lambda: SimpleNamespace(path=nowhere))
    monkeypatch.setattr(watchdog, "_watchdog", None)
    with pytest.warns(RuntimeWarning, match=f"not watched.*{nowhere}: No such file or directory"):
        watchdog.watch(5.0)
