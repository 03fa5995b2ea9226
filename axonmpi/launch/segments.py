"""Files of the MPI library in /dev/shm, which would stay there when a job is killed.

MPICH's ranks of a node have a file of some MiB in common, which it removes at the end of a job only. Once all of
them have mapped it, its name is of no use: without one it goes with the last process, however that ends. Open MPI's
ranks look up each other's files by name later on, so these are removed when the job is aborted.
"""

from __future__ import annotations

import contextlib
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


def _mapped(beginnings: tuple[str, ...]) -> set[Path]:
    """Return the files with such names that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    files = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return {file for file in files if file.parent == SHARED_MEMORY and file.name.startswith(beginnings)}


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
