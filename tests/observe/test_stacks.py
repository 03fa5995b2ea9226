"""The stacks of a process that another one asks for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from axonmpi.launch import board
from axonmpi.observe import RankPage, pages_of, stacks_of, watchdog
from axonmpi.utils.waiting import Backoff, wait_until

RANK = """
import ctypes, sys, threading, time
from dataclasses import asdict
from pathlib import Path
from axonmpi.launch import board
from axonmpi.launch.topology import Topology
from axonmpi.observe import watch

def hold_the_lock():
    ctypes.PyDLL(None).sleep(60)

def end_threads():
    while True:
        thread = threading.Thread(target=deep, args=(200,))
        thread.start()
        thread.join()

def deep(depth):
    return depth and deep(depth - 1)

def sleep():
    time.sleep(60)

board.SHARED_MEMORY = Path(sys.argv[1])
assert not board.publish("asked", asdict(Topology.of([0], 0)))
watch(0)
if sys.argv[2] == "sleep":
    threading.Thread(target=end_threads, daemon=True).start()
print("ready", flush=True)
globals()[sys.argv[2]]()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where pages are."""
    monkeypatch.setattr(board, "SHARED_MEMORY", tmp_path)
    return tmp_path


@contextlib.contextmanager
def rank_in(function: str, folder: Path) -> Iterator[RankPage]:
    """Start a process with a page, which is in a function of its program."""
    command = [sys.executable, "-c", RANK, str(folder), function]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            [page] = pages_of("asked")
            yield page
            assert process.poll() is None
        finally:
            process.kill()


def test_a_rank_whose_threads_end_all_the_time_can_be_asked(folder: Path) -> None:
    """Threads that end while their stacks are read without Python's lock would end the process."""
    with rank_in("sleep", folder) as page:
        for _ in range(100):
            assert "in sleep" in stacks_of([page])[0]


def test_a_rank_that_keeps_pythons_lock_answers_too(folder: Path) -> None:
    with rank_in("hold_the_lock", folder) as page:
        assert wait_until(lambda: "in hold_the_lock" in stacks_of([page], limit=0.2)[0], Backoff(0, 0.05), 20)


def test_a_rank_that_cannot_be_asked_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "gone" / "page"
    monkeypatch.setattr(watchdog, "own_page", lambda: SimpleNamespace(path=nowhere))
    monkeypatch.setattr(watchdog, "_watchdog", None)
    with pytest.warns(RuntimeWarning, match=f"not watched.*{nowhere}: No such file or directory"):
        watchdog.watch(5.0)
