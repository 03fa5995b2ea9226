"""Where the ranks are, on which cores, with how many threads, and whether their clocks agree."""

from __future__ import annotations

import platform
import time
from typing import Any

from ...launch.cpu import count_of_node, usable_cores
from ...launch.start import Started
from ...utils.text import counted, in_ranges, name_ranks
from .findings import Finding

ROUNDS = 8
"""Messages to each rank and back, of which the quickest tells most about its clock."""
MOST_SKEW = 0.1
"""Seconds by which clocks may differ without a warning."""


def places(started: Started | None) -> list[Finding]:
    """Describe each rank, for rank 0 to print; collective."""
    if started is None:
        return []
    at = started.topology
    place = f"node {at.node_rank} ({platform.node()}), local rank {at.local_rank} of {at.local_size}"
    own_cores = f"CPUs {in_ranges(sorted(usable_cores()), ',')}"
    threads = f"{counted(started.num_threads, 'thread')} ({started.threads_reason})"
    own = Finding(f"rank {at.rank}", f"{place}, {own_cores}, {threads}")
    return [own] if started.comm is None else started.comm.gather(own) or []


def cores(started: Started | None) -> list[Finding]:
    """Say whether ranks are in each other's way while cores of their node have nothing to do; collective."""
    if started is None or started.comm is None:
        return []
    at = started.topology
    told = started.comm.gather((at.node_rank, usable_cores(), count_of_node()))
    return [affinity(told)] if told else []


def affinity(told: list[tuple[int, frozenset[int], int]]) -> Finding:
    """Judge the cores of all ranks; local.

    Args:
        told: For each rank the number of its node, its logical CPUs, and how many the ranks of its node may use.
    """
    crowded, idle = [], 0
    for node in sorted({node for node, *_ in told}):
        ranks = [rank for rank, (place, *_) in enumerate(told) if place == node]
        used = frozenset[int]().union(*(told[rank][1] for rank in ranks))
        free = max(told[rank][2] for rank in ranks) - len(used)
        if len(used) < len(ranks) and free > 0:
            crowded += ranks
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
    """Return on rank 0 by how many seconds the clock of each rank is ahead of its own; collective."""
    if comm.rank:
        for _ in range(ROUNDS):
            comm.recv(source=0)
            comm.send(time.time(), dest=0)
        return []
    return [0.0, *(_skew(comm, rank) for rank in range(1, comm.size))]


def _skew(comm: Any, rank: int) -> float:
    """The answer was sent half a round ago (Cristian 1989); the quickest round is least wrong about that."""
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
    """Judge by how many seconds clocks are ahead of rank 0's; local."""
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
