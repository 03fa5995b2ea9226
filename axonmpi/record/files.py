"""Files of a job in /dev/shm: records of a user's ranks on a node, and segments of the MPI library.

The record is a file in /dev/shm. It is memory of the process alone in a job of one rank, for mock ranks, and without
/dev/shm. Records are removed at the end of the job, or, after a failure, when the next job starts.

Every user can make names in /dev/shm. So a folder counts only if it belongs to this user and nobody else can open
it. If another user has taken the plain name, the folder has a random one.

MPICH's ranks of a node have a segment of some MiB in common, which it removes at the end of a job only. Once all of
them have mapped it, its name is of no use: without one it goes with the last process, however that ends. Open MPI's
ranks look up each other's segments by name later on, so these are removed when the job is aborted.
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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..utils.own_files import is_own_folder, open_own
from ..utils.processes import namespace, process
from .writer import GROUPS_AT, IDENTITY_AT, RECORD_BYTES, Header, OwnRecord, Phase

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (folders in it are used once their owner is known)
MAKING_SECONDS = 60.0
"""A record without a name that is older was left behind."""
_NAME = re.compile(r"[0-9a-f]{8}-(\d+|node)(\.\w+)?")
"""Names of records and of files beside them. Files with other names are left alone."""
_ONCE_MAPPED = ("mpich_shm_",)
_AT_ABORT = (*_ONCE_MAPPED, "sm_segment.", "vader_segment.")

_own: OwnRecord | None = None


def own_record() -> OwnRecord:
    """Return this process's record; local."""
    global _own
    if _own is None:
        _own = OwnRecord(mmap.mmap(-1, RECORD_BYTES))
    return _own


def enter_phase(phase: Phase) -> Phase:
    """Say what this rank is about from now on; returns what it was before; local, quick."""
    words = own_record().words
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


def record_files() -> list[Path]:
    """Return the files in this user's folders of records: records and the files beside them; local."""
    files: list[Path] = []
    for folder in _folders():
        with contextlib.suppress(OSError):
            files += sorted(folder.iterdir())
    return files


def _folders() -> list[Path]:
    """Return the folders of this user's records that nobody else can open."""
    try:
        names = os.listdir(SHARED_MEMORY) if _keeps_names() else []
    except OSError:
        return []
    plain = _plain_name()
    paths = [SHARED_MEMORY / name for name in sorted(names) if name == plain or name.startswith(f"{plain}-")]
    return [path for path in paths if is_own_folder(path)]


def make_folder() -> Path | str:
    """Return the folder for the records of a new job, or why there can be none; local, makes it if necessary."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}: mount a tmpfs there"
    if not _keeps_names():
        return f"other users can exchange files in {SHARED_MEMORY}: expected mode 1777, set it with chmod 1777"
    plain = SHARED_MEMORY / _plain_name()
    for path in (plain, *_folders(), plain.with_name(f"{plain.name}-{secrets.token_hex(8)}")):
        try:
            _make_own(path)
            return path
        except PermissionError:  # another user's, or one that others can open
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
    return f"no folder can be made in {SHARED_MEMORY}"


def _plain_name() -> str:
    return f"axonmpi-{os.geteuid()}"


def _keeps_names() -> bool:
    """Return whether other users cannot remove or rename this user's files in the folder for shared memory."""
    found = SHARED_MEMORY.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in (0, os.geteuid()) and (not others_write or bool(found.st_mode & stat.S_ISVTX))


def _make_own(path: Path) -> None:
    """Make a folder of this user's own; raises PermissionError if there is anything else."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_own_folder(path):
        raise PermissionError(errno.EPERM, "expected a folder of this user that nobody else can open", str(path))


def publish_record(folder: Path, job: str, identity: dict[str, Any]) -> str:
    """Make this process's record one that others can read; local, before the rank has groups.

    Args:
        folder: Folder of `make_folder`, called on one rank of the node.
        job: Name of the job, the same on all its ranks.
        identity: What the record says of the rank: at least `rank`.

    Returns:
        Why that cannot be; empty if it can.
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


def identity_of(record: Path) -> dict[str, Any]:
    """Return who the rank of a record is; empty while the record is being made; local.

    Raises:
        OSError: There is no such record.
    """
    file = open_own(record)
    try:
        head = os.read(file, GROUPS_AT)
    finally:
        os.close(file)
    nbytes = int.from_bytes(head[8 * Header.IDENTITY_BYTES :][:8], sys.byteorder)
    found: dict[str, Any] = json.loads(head[IDENTITY_AT : IDENTITY_AT + nbytes]) if nbytes else {}
    return found


def remove_stale_records() -> None:
    """Remove the records of jobs whose processes are gone, with the files that they name; local."""
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
    """Say whether the rank of a record is gone; raises OSError if the record is."""
    if file.suffix:  # what belongs to a record goes with it
        return True
    identity = identity_of(file)
    if not identity:  # it is being made, unless that was long ago
        return time.time() - file.stat().st_mtime > MAKING_SECONDS
    if identity["namespace"] != namespace():
        return False
    found = process(identity["pid"])
    return found is None or found.started != identity["started"] or found.has_ended


def remove_own_record() -> None:
    """Remove this rank's record, at the end of a job that has not failed; local."""
    if _own is not None and _own.path is not None:
        for path in (_own.path, *_own.path.parent.glob(f"{_own.path.name}.*")):
            path.unlink(missing_ok=True)


def _leave_to_parent() -> None:
    """Leave the record to the rank that has forked this process."""
    global _own
    _own = None


def _create(path: Path) -> mmap.mmap:
    """Make a file for a record; raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, RECORD_BYTES)  # or writing would be a bus error where /dev/shm is full
        return mmap.mmap(file, RECORD_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


# ---- segments of the MPI library --------------------------------------------------------------------------------


def remove_segments(*, at_abort: bool) -> None:
    """Remove names of the MPI library's segments that this process has mapped; local.

    Args:
        at_abort: The job ends now. False: all ranks of this node have mapped theirs; by one rank of the node.
    """
    _remove(_mapped(_AT_ABORT if at_abort else _ONCE_MAPPED))


def _mapped(beginnings: tuple[str, ...]) -> set[tuple[Path, int]]:
    """Return paths and inodes of files with such names that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    fields = [line.split(maxsplit=5) for line in lines if line.count("/")]
    files = {(Path(path), int(inode)) for *_, inode, path in fields}
    return {each for each in files if each[0].parent == SHARED_MEMORY and each[0].name.startswith(beginnings)}


def _remove(files: Iterable[tuple[Path, int]]) -> None:
    """Remove names of files, unless they have become names of other files, or of another user's."""
    for path, inode in files:
        with contextlib.suppress(OSError):
            found = path.lstat()
            if (found.st_ino, found.st_uid) == (inode, os.geteuid()):
                path.unlink()
