"""Limits of each rank's process (`ulimit`): open files, locked memory, stack, processes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...launch.start import Started
from ...utils.text import name_ranks
from .findings import Finding
from .ranks import gathered

_MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """A limit of a process.

    Attributes:
        name: Its name in `ulimit` and `limits.conf`.
        kind: Its number in `resource`.
        unit: The unit of its text, as a number and as a suffix.
        needed: Returns the least value for a job of this many ranks.
        reason: The consequence of a lower value.
        todo: The command that raises it.
    """

    name: str
    kind: int
    unit: tuple[int, str]
    needed: Callable[[int], int]
    reason: str
    todo: str


def _locked_memory(_: int) -> int:
    """Return the least limit of locked memory, which only InfiniBand needs."""
    return 1 << 40 if any(Path("/sys/class/infiniband").glob("*")) else 0


_LIMITS = (
    Limit(
        "nofile", resource.RLIMIT_NOFILE, (1, ""), lambda ranks: 256 + 4 * ranks,
        "MPI and shared memory need a file or a connection for each other rank", "ulimit -n 65536",
    ),
    Limit(
        "memlock", resource.RLIMIT_MEMLOCK, (_MIB, " MiB"), _locked_memory,
        "InfiniBand cannot register memory, and MPI may take TCP or fail", "ulimit -l unlimited",
    ),
    Limit(
        "stack", resource.RLIMIT_STACK, (_MIB, " MiB"), lambda _: 2 * _MIB,
        "deep recursion, as in saving or compiling a model, crashes", "ulimit -s 8192",
    ),
    Limit(
        "nproc", resource.RLIMIT_NPROC, (1, ""), lambda ranks: 1024,
        "threads and DataLoader workers of all ranks of the node count", "ulimit -u 65536",
    ),
)  # fmt: skip


def limits(started: Started | None) -> list[Finding]:
    """Describe the limits of all ranks, for rank 0 to print; collective."""
    own = [resource.getrlimit(limit.kind)[0] for limit in _LIMITS]
    ranks = gathered(started, own)
    return [judged(limit, list(values)) for limit, values in zip(_LIMITS, zip(*ranks, strict=True), strict=True)]


def judged(limit: Limit, values: list[int]) -> Finding:
    """Return the finding for a limit, from its values on all ranks; local."""
    needed = limit.needed(len(values))
    low = [rank for rank, value in enumerate(values) if value != resource.RLIM_INFINITY and value < needed]
    known = sorted({value for value in values if value != resource.RLIM_INFINITY})
    least = _shown(limit, known[0] if known else resource.RLIM_INFINITY)
    if not low:
        return Finding(limit.name, least)
    where = f" on {name_ranks(low)}" if len(values) > 1 else ""
    todo = f"{limit.todo}, in the job script, or in /etc/security/limits.conf"
    return Finding(limit.name, f"{least}{where}: {limit.reason}", "warn", todo)


def _shown(limit: Limit, value: int) -> str:
    size, unit = limit.unit
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // size:,}{unit}"
