"""Names of the MPI library's shared-memory segments in /dev/shm, removed so that a crash leaves none behind.

MPICH's ranks of a node share a segment of some MiB, which MPICH removes only at the end of a job. Its name is
useless once all ranks have mapped it: without a name the segment is freed with the last process, however that ends.
Open MPI's ranks look up each other's segments by name later on, so these names are removed only if the job is
aborted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..record.files import SHARED_MEMORY
from ..utils.processes import mapped_files

_ONCE_MAPPED = ("mpich_shm_",)
_AT_ABORT = (*_ONCE_MAPPED, "sm_segment.", "vader_segment.")


def remove_segments(*, at_abort: bool) -> None:
    """Remove names of the MPI library's segments that this process has mapped; local.

    Args:
        at_abort: True at the end of the job. False once all ranks of this node have mapped their segments, on one
            rank of the node.
    """
    _remove(_mapped(_AT_ABORT if at_abort else _ONCE_MAPPED))


def _mapped(beginnings: tuple[str, ...]) -> dict[Path, int]:
    """Return the mapped files whose names begin so, with their inodes."""
    files = mapped_files().items()
    return {
        path: inode for path, inode in files if path.parent == SHARED_MEMORY and path.name.startswith(beginnings)
    }


def _remove(files: Mapping[Path, int]) -> None:
    """Remove names of files, unless a name now belongs to another file or user."""
    for path, inode in files.items():
        with contextlib.suppress(OSError):
            found = path.lstat()
            if (found.st_ino, found.st_uid) == (inode, os.geteuid()):
                path.unlink()
