"""Locks of saves: held by one job, free when it has ended, and recognised when it was killed."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.compare import refused

from axonmpi.checkpoint.files import lock as locks
from axonmpi.checkpoint.files.lock import Lock, lock_of

HOLDER = """
import sys
from pathlib import Path
from axonmpi.checkpoint.files.lock import Lock, lock_of
lock = Lock(lock_of(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


def another_job(path: Path) -> "subprocess.Popen[bytes]":
    """Start a process that has the lock until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.readline() == b"held\n"
    return job


@pytest.mark.parametrize("killed", [True, False])
def test_another_job_is_named_and_its_end_frees_the_lock(killed: bool, tmp_path: Path) -> None:
    path = tmp_path / "it"
    with another_job(path) as job:
        refused(BlockingIOError, (lambda: Lock(lock_of(path)), f"another job saves there: process {job.pid} on "))
        if killed:
            job.send_signal(signal.SIGKILL)
        job.communicate()
    assert lock_of(path).exists() == killed
    lock = Lock(lock_of(path))
    assert lock.may_tidy == killed
    refused(BlockingIOError, (lambda: Lock(lock_of(path)), "this process saves there already"))
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_lock_stays(tmp_path: Path) -> None:
    lock_of(tmp_path / "it").write_text("somebody's own")
    refused(FileExistsError, (lambda: Lock(lock_of(tmp_path / "it")), "is no lock of a save: move it away"))
    assert lock_of(tmp_path / "it").read_text() == "somebody's own"


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(RuntimeWarning, match="this file system has no locks"):
        Lock(lock_of(tmp_path / "it")).release()
    assert os.listdir(tmp_path) == []
    assert lock_of(tmp_path / "it") not in locks._held


def test_an_owner_that_has_not_written_its_line_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    with another_job(path) as job:
        line = lock_of(path).read_bytes()
        os.truncate(lock_of(path), 0)
        monkeypatch.setattr(locks.time, "sleep", lambda _: lock_of(path).write_bytes(line))
        refused(BlockingIOError, (lambda: Lock(lock_of(path)), f"another job saves there: process {job.pid} on "))
        job.communicate()
