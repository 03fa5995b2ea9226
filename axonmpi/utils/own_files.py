"""Files in folders that other users can write to, such as /dev/shm: opened only if owner and type are right."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_own_folder(path: Path) -> bool:
    """Return True if a path is a folder, not a link to one, of this user that nobody else can open; local."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user; return a file descriptor; local, never blocks.

    Raises:
        OSError: There is none, or it is a link, another kind of file, or another user's.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise PermissionError(errno.EPERM, "expected a regular file of this user", str(path))
    return file
