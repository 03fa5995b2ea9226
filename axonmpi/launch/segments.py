"""Files of the MPI library in /dev/shm, which would stay there when a job is killed.

MPICH's ranks of a node have a file of some MiB in common, which it removes at the end of a job only. Once all of
them have mapped it, its name is of no use: without one it goes with the last process, however that ends. Open MPI's
ranks look up each other's files by name later on, so these are removed when the job is aborted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from .board import SHARED_MEMORY

__all__ = ["remove_at_abort", "remove_names"]

_ONCE_MAPPED = ("mpich_shm_",)
_AT_ABORT = (*_ONCE_MAPPED, "sm_segment.", "vader_segment.")


def remove_names() -> None:
    """Remove the names of files that all ranks of this node have mapped; local, by one rank of the node."""
    _remove(_mapped(_ONCE_MAPPED))


def remove_at_abort() -> None:
    """Remove what this process has mapped: the job ends now; local."""
    _remove(_mapped(_AT_ABORT))


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
