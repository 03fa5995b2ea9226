"""Shared memory of MPI libraries in /dev/shm: the space for it, and the files that ended jobs have left."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ...launch.cpu import usable_cores
from ...launch.start import Started
from ...utils.text import counted
from .findings import Finding
from .ranks import gathered

FOLDER = Path("/dev/shm")  # noqa: S108 - looked at, not written to
RANKS_SHARED_MEMORY = 16 << 20
_MIB = float(1 << 20)
_OF_MPI = re.compile(r"mpich_shm_|vader_segment\.|sm_segment\.|psm[23]_shm|\.?ucx_shm|osc_rdma")
_SHOWN = 4


def shared_memory(started: Started | None) -> list[Finding]:
    """Describe the size of /dev/shm and the free space, on this node; local."""
    try:
        total, _, free = shutil.disk_usage(FOLDER)
    except OSError:
        todo = "mount -t tmpfs tmpfs /dev/shm"
        return [Finding(str(FOLDER), "there is none", "warn", todo)]
    text = f"{total / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB free"
    ranks = max(0 if started is None else started.topology.local_size, len(usable_cores()), 2)
    if total < ranks * RANKS_SHARED_MEMORY:
        todo = "in a container enlarge it, --shm-size=1g; elsewhere mount -o remount,size=1g /dev/shm"
        return [Finding(str(FOLDER), f"{text}\nsmall for {ranks} ranks: MPI may crash", "warn", todo)]
    if free < ranks * RANKS_SHARED_MEMORY:
        todo = "remove what is not needed there"
        return [Finding(str(FOLDER), f"{text}\ntoo full for {ranks} ranks: MPI may crash", "warn", todo)]
    return [Finding(str(FOLDER), text)]


def leftovers(started: Started | None) -> list[Finding]:
    """List the files of MPI libraries that no process uses, on each node, for rank 0 to print; collective."""
    own = left_by_jobs(FOLDER) if started is None or started.topology.local_rank == 0 else []
    return [_leftover(files) for files in gathered(started, own) if files]


def left_by_jobs(folder: Path) -> list[tuple[str, int]]:
    """Return names and bytes of this user's files of MPI libraries that no process uses; local.

    Files of other users are left out, since their processes cannot be seen.
    """
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            if _OF_MPI.match(path.name):
                status = path.stat()
                if status.st_uid == os.getuid():
                    found.append((path.name, status.st_size))
    used = _used_files(folder) if found else ""
    return sorted((name, size) for name, size in found if f"{folder}/{name}" not in used)


def _used_files(folder: Path) -> str:
    """Return the lines about a folder in the memory maps of all processes that this one can see."""
    lines = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            lines += [line for line in maps.read_text().splitlines() if str(folder) in line]
    return "\n".join(lines)


def _leftover(files: list[tuple[str, int]]) -> Finding:
    size = sum(size for _, size in files) / _MIB
    names = ", ".join([name for name, _ in files[:_SHOWN]] + ["..."] * (len(files) > _SHOWN))
    remove = " ".join(f"{FOLDER}/{name}" for name, _ in files[:_SHOWN])
    text = f"{counted(len(files), 'file')} of jobs that have ended, {size:,.0f} MiB: {names}"
    return Finding("left there", text, "warn", f"rm {remove}")
