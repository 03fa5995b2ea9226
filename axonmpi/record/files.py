"""Files of the records of a user's ranks, in /dev/shm.

A rank's record is private memory in a job of one rank, for mock ranks, and without /dev/shm. Files are removed at
the end of the job, or, after a failure, when the user's next job starts on the node.

Every user can create names in /dev/shm. So a folder is used only if it belongs to this user and nobody else can
open it. If another user has taken the plain name, the folder gets a random name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..utils.own_files import is_own_folder, open_own
from ..utils.processes import Process, namespace, process
from .layout import GROUPS_AT, IDENTITY_AT, RECORD_BYTES, Header, Phase
from .writer import OwnRecord

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (folders in it are used once their owner is known)
MAKING_SECONDS = 60.0
"""Age from which a record without an identity counts as left behind."""
_NAME = re.compile(r"[0-9a-f]{8}-(\d+|node)(\.\w+)?")
"""Names of records and of files beside them. Other files are left alone."""

_own: OwnRecord | None = None
_of_thread = threading.local()
"""The record of a mock rank, on its thread."""


# ---- this rank's record -----------------------------------------------------------------------------------------


def own_record() -> OwnRecord:
    """Return the record of this process, or of the mock rank whose thread this is; local."""
    global _own
    found: OwnRecord | None = getattr(_of_thread, "record", None)
    if found is not None:
        return found
    if _own is None:
        _own = private_record()
    return _own


def private_record() -> OwnRecord:
    """Make a record that other processes cannot read; local."""
    return OwnRecord(mmap.mmap(-1, RECORD_BYTES))


@contextlib.contextmanager
def record_of_thread(record: OwnRecord | None) -> Iterator[None]:
    """Make a mock rank's record that of this thread for a `with` block; None is the process's; local."""
    before, _of_thread.record = getattr(_of_thread, "record", None), record
    try:
        yield
    finally:
        _of_thread.record = before


def enter_phase(phase: Phase, label: object = "") -> Phase:
    """Set the phase of this rank's program and return the phase before; local, fast.

    Args:
        phase: The phase that begins.
        label: Shown beside the phase in a trace.
    """
    record = own_record()
    before = record.words[Header.PHASE]
    record.words[Header.PHASE] = phase
    if record.trace is not None:
        record.trace.enter_phase(phase, str(label))
    return Phase(before)


@contextlib.contextmanager
def phase(during: Phase) -> Iterator[None]:
    """Set the phase of this rank's program for a `with` block; local."""
    before = enter_phase(during)
    try:
        yield
    finally:
        enter_phase(before)


def publish_record(folder: Path, job: str, identity: dict[str, Any]) -> str:
    """Move this process's record to a file that other processes can read; local, before the rank has groups.

    Args:
        folder: Folder of `make_folder`, called on one rank of the node.
        job: Name of the job, the same on all its ranks.
        identity: Further fields of the record's identity: at least `rank`.

    Returns:
        The reason for a failure; empty on success.
    """
    global _own
    path = folder / f"{job}-{identity['rank']}"
    try:
        _make_own(folder)  # the rank that has made it may be in a container with another /dev/shm
        memory = _create(path)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    _own = OwnRecord(memory, path)
    here = process(os.getpid())
    _own.sign(
        {
            "job": job,
            "pid": os.getpid(),
            "started": 0 if here is None else here.started,
            "parent": os.getppid(),
            "namespace": namespace(),
            "host": os.uname().nodename,
            "wall_clock": time.time_ns() - time.monotonic_ns(),
            "program": " ".join(sys.argv)[:512],
            **identity,
        }
    )
    os.register_at_fork(after_in_child=_leave_to_parent)
    return ""


def _create(path: Path) -> mmap.mmap:
    """Create the file of a record and map it; raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, RECORD_BYTES)  # or a write would be a bus error if /dev/shm is full
        return mmap.mmap(file, RECORD_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def _leave_to_parent() -> None:
    """Leave the record to the rank that has forked this process."""
    global _own
    _own = None


def remove_own_record() -> None:
    """Remove this rank's files, at the end of a job that has not failed; local."""
    if _own is not None and _own.path is not None:
        for path in (_own.path, *_own.path.parent.glob(f"{_own.path.name}.*")):
            path.unlink(missing_ok=True)


# ---- folders ----------------------------------------------------------------------------------------------------


def make_folder() -> Path | str:
    """Return the folder for the records of a new job, made if necessary, or the reason for a failure; local."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}: mount a tmpfs there"
    if not _keeps_names():
        return f"other users can exchange files in {SHARED_MEMORY}: expected mode 1777, set it with chmod 1777"
    plain = SHARED_MEMORY / _plain_name()
    for path in (plain, *_folders(), plain.with_name(f"{plain.name}-{secrets.token_hex(8)}")):
        try:
            _make_own(path)
            return path
        except PermissionError:  # another user's, or open to others
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
    return f"no folder can be made in {SHARED_MEMORY}"


def _plain_name() -> str:
    return f"axonmpi-{os.geteuid()}"


def _keeps_names() -> bool:
    """Return True if other users can neither remove nor rename this user's files in the shared-memory folder."""
    found = SHARED_MEMORY.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in (0, os.geteuid()) and (not others_write or bool(found.st_mode & stat.S_ISVTX))


def _make_own(path: Path) -> None:
    """Make a folder that only this user can open; raises PermissionError for any other existing file."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_own_folder(path):
        raise PermissionError(errno.EPERM, "expected a folder of this user that nobody else can open", str(path))


def _folders() -> list[Path]:
    """Return this user's folders of records that nobody else can open."""
    try:
        names = os.listdir(SHARED_MEMORY) if _keeps_names() else []
    except OSError:
        return []
    plain = _plain_name()
    paths = [SHARED_MEMORY / name for name in sorted(names) if name == plain or name.startswith(f"{plain}-")]
    return [path for path in paths if is_own_folder(path)]


# ---- files of all ranks -----------------------------------------------------------------------------------------


def record_files() -> list[Path]:
    """Return this user's records and the files beside them; local."""
    files: list[Path] = []
    for folder in _folders():
        with contextlib.suppress(OSError):
            files += sorted(folder.iterdir())
    return files


def identity_of(record: Path) -> dict[str, Any]:
    """Return the identity in a record; empty while the record is being made; local.

    Raises:
        OSError: There is no such record.
    """
    with open(open_own(record), "rb") as file:
        head = file.read(GROUPS_AT)
    nbytes = int.from_bytes(head[8 * Header.IDENTITY_BYTES :][:8], sys.byteorder)
    identity: dict[str, Any] = json.loads(head[IDENTITY_AT : IDENTITY_AT + nbytes]) if nbytes else {}
    return identity


def living_process(pid: int, started: int) -> Process | None:
    """Return the process of a rank; None if it has ended, even if its number is in use again; local.

    Args:
        pid: Process number, of this process's namespace.
        started: Start time of the rank's process.
    """
    found = process(pid)
    return None if found is None or found.started != started else found


def remove_stale_records() -> None:
    """Remove the files of jobs all of whose processes have ended; local."""
    jobs: dict[str, list[Path]] = {}
    for path in record_files():
        if _NAME.fullmatch(path.name):
            jobs.setdefault(path.name.partition("-")[0], []).append(path)
    for files in jobs.values():
        with contextlib.suppress(OSError, ValueError):
            if all(map(_is_stale, files)):
                for file in files:
                    file.unlink()


def _is_stale(file: Path) -> bool:
    """Return True if a file's rank has ended, and for files beside records; raises OSError without the file."""
    if file.suffix:
        return True
    identity = identity_of(file)
    if not identity:  # being made, unless that was long ago
        return time.time() - file.stat().st_mtime > MAKING_SECONDS
    return identity["namespace"] == namespace() and living_process(identity["pid"], identity["started"]) is None
