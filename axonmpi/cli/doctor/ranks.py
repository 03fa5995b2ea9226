"""Lines of `axonmpi doctor` on the ranks: their nodes, cores and threads, and the skew of their clocks."""

from __future__ import annotations

import platform
import time
from typing import Any

from ...launch.cpu import count_of_node, usable_cores
from ...launch.start import Started
from ...utils.text import counted, in_ranges, name_ranks
from .findings import Finding

ROUNDS = 8
"""Messages to each rank and back; the quickest has the least error."""
MOST_SKEW = 0.1
"""Seconds by which clocks may differ without a warning."""


def gathered(started: Started | None, own: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, and this rank's own on the others; collective."""
    comm = None if started is None else started.comm
    return [own] if comm is None else comm.gather(own) or [own]


def locations(started: Started | None) -> list[Finding]:
    """Describe each rank, for rank 0 to print; collective."""
    if started is None:
        return []
    at = started.topology
    node = f"node {at.node_rank} ({platform.node()}), local rank {at.local_rank} of {at.local_size}"
    own_cores = f"CPUs {in_ranges(sorted(usable_cores()), ',')}"
    threads = f"{counted(started.num_threads, 'thread')} ({started.threads_reason})"
    return gathered(started, Finding(f"rank {at.rank}", f"{node}, {own_cores}, {threads}"))


def affinity(started: Started | None) -> list[Finding]:
    """Find ranks that share cores while other cores of their node are idle; collective."""
    if started is None or started.comm is None:
        return []
    own = started.topology.node_rank, usable_cores(), count_of_node()
    return [judged_affinity(gathered(started, own))]


def judged_affinity(ranks: list[tuple[int, frozenset[int], int]]) -> Finding:
    """Return the finding for the cores of all ranks; local.

    Args:
        ranks: For each rank the number of its node, its logical CPUs, and the number that its node's ranks may use.
    """
    crowded, idle = [], 0
    for node in sorted({node for node, *_ in ranks}):
        members = [rank for rank, (other, *_) in enumerate(ranks) if other == node]
        used = frozenset[int]().union(*(ranks[rank][1] for rank in members))
        free = max(ranks[rank][2] for rank in members) - len(used)
        if len(used) < len(members) and free > 0:
            crowded += members
            idle += free
    if not crowded:
        return Finding("affinity", "no rank shares a core while another core has nothing to do")
    return Finding(
        "affinity",
        f"{name_ranks(crowded)} share cores, and nothing runs on {counted(idle, 'other core')} of their nodes",
        "warn",
        "give each rank cores of its own: mpirun --bind-to core, or none; srun --cpus-per-task=N --cpu-bind=cores",
    )


def clocks(started: Started | None) -> list[Finding]:
    """Compare the clocks of all ranks with rank 0's, by messages to them and back; collective."""
    if started is None or started.comm is None or started.comm.size == 1:
        return []
    skews = _skews(started.comm)
    return [clock_skew(skews)] if skews else []


def _skews(comm: Any) -> list[float]:
    """Return on rank 0 the seconds by which each rank's clock is ahead of its own; collective."""
    if comm.rank:
        for _ in range(ROUNDS):
            comm.recv(source=0)
            comm.send(time.time(), dest=0)
        return []
    return [0.0, *(_skew(comm, rank) for rank in range(1, comm.size))]


def _skew(comm: Any, rank: int) -> float:
    """Return the seconds by which a rank's clock is ahead, by Cristian's algorithm (1989).

    The answer is taken to have been sent half a round ago, which is least wrong in the quickest round.
    """
    rounds = []
    for _ in range(ROUNDS):
        begun = time.time()
        comm.send(None, dest=rank)
        answer = comm.recv(source=rank)
        ended = time.time()
        rounds.append((ended - begun, answer - (begun + ended) / 2))
    _, skew = min(rounds)
    return float(skew)


def clock_skew(skews: list[float]) -> Finding:
    """Return the finding for the seconds by which clocks are ahead of rank 0's; local."""
    spread = max(skews) - min(skews)
    apart = [rank for rank, skew in enumerate(skews) if abs(skew) > MOST_SKEW]
    if not apart:
        return Finding("clocks", f"at most {spread * 1e3:.3g} ms apart")
    return Finding(
        "clocks",
        f"up to {spread:.3g} s apart; not as rank 0's: {name_ranks(apart)}",
        "warn",
        "let NTP or chrony set the clocks: the logs of nodes cannot be compared, and files seem too old or new",
    )
