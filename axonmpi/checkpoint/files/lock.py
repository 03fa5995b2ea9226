"""Locks that keep two jobs from saving to one path.

    .NAME.axonmpi-lock      one line: the process that holds it, and its program

The kernel, or the server of NFS 4 or Lustre, releases a lock when its process ends in any way. The file stays
after a kill, and tells the next job that a save has left the folders beside the checkpoint. Readers take no lock.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

SUFFIX = ".axonmpi-lock"
_BEGIN = b"axonmpi: "
_MOST_BYTES = 4096
_MOST_LOOKS, _NAP_SECONDS = 500, 0.01
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[Path] = set()
_guard = threading.RLock()  # reentrant: the garbage collector may release a lock at any point


def lock_of(path: Path) -> Path:
    """Return the lock file of a path, in the same folder."""
    return path.parent / f".{path.name}{SUFFIX}"


class Lock:
    """A lock that this process holds until `release`, or until the object is garbage.

    The kernel's locks belong to a process, so threads of one process exclude each other by a set of paths.

    Args:
        path: Of the lock's file; its folder is there.

    Attributes:
        may_tidy: True if the folders beside the checkpoint are a save's: a killed one's that has left its lock, or
            this one's.

    Raises:
        BlockingIOError: Another job holds it, and is named, or another save of this process.
        OSError: The file cannot be made, or is no lock.
    """

    def __init__(self, path: Path) -> None:
        own = Path(os.path.realpath(path.parent)) / path.name
        with _guard:
            if own in _held:
                raise BlockingIOError(errno.EAGAIN, "this process saves there already: wait for that", str(path))
            file, text = _opened(own)
            _held.add(own)
        self._end = weakref.finalize(self, _release, own, file, os.getpid())
        self.may_tidy = bool(text)
        line = _owner()
        os.pwrite(file, line, 0)
        os.ftruncate(file, len(line))  # after the write: the file is never without a line

    def release(self, *, keep: bool = False) -> None:
        """Release the lock; once.

        Args:
            keep: Leave the file, as a kill would, since folders are left to remove.
        """
        if self._end.alive:
            _, _, arguments, _ = self._end.detach() or (None, None, (), None)
            _release(*arguments, keep=keep)


def _release(path: Path, file: int, process: int, *, keep: bool = False) -> None:
    """Release a lock; in a forked child do nothing."""
    if process != os.getpid():
        return
    with _guard:
        if path in _held:
            with suppress(OSError):
                if not keep:
                    path.unlink(missing_ok=True)
            os.close(file)
            _held.discard(path)


def _opened(path: Path) -> tuple[int, bytes]:
    """Return the locked file, and the line of an owner that has ended without a release."""
    for look in itertools.count():
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            has_it = _try(file, path)
            text = os.pread(file, _MOST_BYTES, 0)
            if text and not text.startswith(_BEGIN):
                raise FileExistsError(errno.EEXIST, "it is no lock of a save: move it away", str(path))
            if not has_it and (text or look == _MOST_LOOKS):
                owner = text.removeprefix(_BEGIN).decode("utf-8", "replace").strip() or "it does not say which"
                raise BlockingIOError(
                    errno.EAGAIN, f"another job saves there: {owner}; give each job a path of its own", str(path)
                )
            if has_it and _is_at(file, path):  # else its owner has removed the file meanwhile
                return file, text
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_NAP_SECONDS)  # the owner is about to write a line, or to remove the file
    raise AssertionError


def _try(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}), so nothing keeps a second job from "
                "saving to the same path: give each job one of its own, or have it mounted with locks",
                RuntimeWarning,
                stacklevel=2,
            )
            return True
        if error.errno not in _HELD_BY_ANOTHER:
            raise
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _owner() -> bytes:
    where = f"process {os.getpid()} on {socket.gethostname()}"
    program = " ".join(sys.argv).encode("unicode_escape", "backslashreplace").decode()[:200]
    return _BEGIN + f"{where}, since {time.strftime('%Y-%m-%d %H:%M:%S')}: {program}\n".encode()
