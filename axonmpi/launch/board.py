"""This process's page, and the folder in which the pages of a user's ranks on a node lie.

The page of a job of one rank, of mock ranks, and of a rank where there is no /dev/shm, is memory of the process
itself. Pages are removed at the end of the job, or, where it has failed, when the next job starts.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..utils.processes import namespace, process
from .page import GROUPS_AT, IDENTITY_AT, PAGE_BYTES, Header, Page, Phase

__all__ = [
    "SHARED_MEMORY",
    "enter_phase",
    "folder_of_pages",
    "identity_of",
    "open_folder",
    "own_page",
    "phase",
    "publish",
    "remove_own",
    "remove_stale",
]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder of pages in it is opened with care)
MAKING_SECONDS = 60.0
"""A page without a name that is older was left behind."""

_own: Page | None = None


def own_page() -> Page:
    """Return this process's page; local."""
    global _own
    if _own is None:
        _own = Page(mmap.mmap(-1, PAGE_BYTES))
    return _own


def enter_phase(phase: Phase) -> Phase:
    """Say what this rank is about from now on; returns what it was before; local, quick."""
    words = own_page().words
    before = words[Header.PHASE]
    words[Header.PHASE_SINCE] = time.monotonic_ns()
    words[Header.PHASE] = phase
    return Phase(before)


@contextlib.contextmanager
def phase(during: Phase) -> Iterator[None]:
    """Say what this rank is about in the block; local."""
    before = enter_phase(during)
    try:
        yield
    finally:
        enter_phase(before)


def folder_of_pages() -> Path:
    """Return the folder of this user's pages, whether it is there or not; local."""
    return SHARED_MEMORY / f"axonmpi-{os.geteuid()}"


def publish(job: str, identity: dict[str, Any]) -> str:
    """Make this process's page one that others can read; local, before the rank has groups.

    Args:
        job: Name of the job, the same on all its ranks.
        identity: What the page says of the rank: at least `rank`.

    Returns:
        Why that cannot be; empty if it can.
    """
    global _own
    path = folder_of_pages() / f"{job}-{identity['rank']}"
    try:
        memory = _create(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    _own = Page(memory, path)
    here = process(os.getpid())
    _own.sign(
        {
            "job": job,
            "pid": os.getpid(),
            "started": 0 if here is None else here.started,
            "parent": os.getppid(),
            "namespace": namespace(),
            "host": os.uname().nodename,
            "main_thread": threading.main_thread().ident,
            "wall_clock": time.time_ns() - time.monotonic_ns(),
            "program": " ".join(sys.argv)[:512],
            **identity,
        }
    )
    os.register_at_fork(after_in_child=_leave_to_parent)
    return ""


def identity_of(page: Path) -> dict[str, Any]:
    """Return who the rank of a page is; empty while the page is being made; local.

    Raises:
        OSError: There is no such page.
    """
    with open(page, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as file:
        head = file.read(GROUPS_AT)
    nbytes = int.from_bytes(head[8 * Header.IDENTITY_BYTES :][:8], sys.byteorder)
    found: dict[str, Any] = json.loads(head[IDENTITY_AT : IDENTITY_AT + nbytes]) if nbytes else {}
    return found


def remove_stale() -> None:
    """Remove the pages of jobs whose processes are gone, with the files that they name; local."""
    jobs: dict[str, list[Path]] = {}
    for path in folder_of_pages().glob("*-*"):
        jobs.setdefault(path.name.partition("-")[0], []).append(path)
    for files in jobs.values():
        with contextlib.suppress(OSError, ValueError):
            if all(map(_is_stale, files)):
                for file in files:
                    file.unlink()


def _is_stale(file: Path) -> bool:
    """Say whether the rank of a page is gone; raises OSError if the page is."""
    if file.suffix:  # what belongs to a page goes with it
        return True
    identity = identity_of(file)
    if not identity:  # it is being made, unless that was long ago
        return time.time() - file.stat().st_mtime > MAKING_SECONDS
    if identity["namespace"] != namespace():
        return False
    found = process(identity["pid"])
    return found is None or found.started != identity["started"] or found.has_ended


def remove_own() -> None:
    """Remove this rank's page, at the end of a job that has not failed; local."""
    if _own is not None and _own.path is not None:
        for path in (_own.path, *_own.path.parent.glob(f"{_own.path.name}.*")):
            path.unlink(missing_ok=True)


def _leave_to_parent() -> None:
    """Leave the page to the rank that has forked this process."""
    global _own
    _own = None


def _create(path: Path) -> mmap.mmap:
    """Make a file for a page in the user's folder, which nobody else may write to; raises OSError."""
    folder = open_folder(path.parent, make=True)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path.name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        os.posix_fallocate(file, 0, PAGE_BYTES)  # or writing would be a bus error where /dev/shm is full
        return mmap.mmap(file, PAGE_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def open_folder(path: Path, *, make: bool = False) -> int:
    """Open the folder of pages; returns a file descriptor; local.

    Raises:
        OSError: It is not there, or another user could read or write what is in it.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(folder)
        raise PermissionError(1, "expected a folder of this user's own that nobody else can open", str(path))
    return folder
