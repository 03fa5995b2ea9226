"""The path of data between ranks: the libraries that MPI has loaded, the path that axonmpi takes, and its speed."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ...backends import Backend, MpiBackend, path_of, remedy
from ...launch.start import Started
from ...launch.user_variables import pretended_node, wants_shared_memory
from ...utils.text import counted
from .findings import Finding

SIZE = 1 << 20
"""Bytes of the all-reduce that is timed."""
ROUNDS = 20
LEAST_SPEED = 0.1e9
"""Bytes a second below which a warning is due: those of a network of 1 Gbit/s."""
MOST_LATENCY = 1e-3
"""Seconds of an all-reduce of four bytes above which a warning is due."""
_SHARED_PATHS = {
    "node": "through memory that all ranks share",
    "nodes": "through memory that the ranks of a node share, by MPI between nodes",
}
_DEVICE = re.compile(r"MPICH Device:\s*(\S+)")
_TRANSPORT = re.compile(r"/(lib(?:fabric|ucp|ibverbs|psm2|psm_infinipath|mlx5|cxi|opx)\b)[^/]*$")


def fabric(started: Started | None) -> list[Finding]:
    """Describe MPI's device, the network libraries that it has loaded, and the machine's InfiniBand; local."""
    if started is None or started.comm is None:
        return []
    from mpi4py import MPI

    device = _DEVICE.search(MPI.Get_library_version())
    loaded = _transports(Path("/proc/self/maps"))
    hardware = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    parts = [
        *([f"device {device[1]}"] if device else []),
        f"loaded: {', '.join(loaded) or 'no library of a fast network'}",
        f"InfiniBand or RoCE: {', '.join(hardware) or 'none'}",
    ]
    uses_it = {"libucp", "libfabric", "libibverbs", "libpsm2", "libmlx5"} & set(loaded)
    if hardware and started.topology.num_nodes > 1 and not uses_it:
        todo = "take the site's MPI module, which is built for this network"
        return [Finding("fabric", "; ".join(parts) + "\nMPI seems to go by TCP", "warn", todo)]
    return [Finding("fabric", "; ".join(parts))]


def _transports(maps: Path) -> list[str]:
    """Return the libraries of networks that this process has loaded, without versions; local."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    return sorted({found[1] for line in lines if (found := _TRANSPORT.search(line))})


def wrong_settings(comm: Any) -> Finding | None:
    """Return the reason why ranks differ on sharing memory, or None; collective."""
    try:
        pretended_node(comm.rank)
        own = (wants_shared_memory(), "")
    except ValueError as error:
        own = (False, str(error))
    wanted, problems = zip(*comm.allgather(own), strict=True)
    uneven = (
        f"AXONMPI_COLLECTIVES: expected the same on all ranks, got 'plain' on {wanted.count(False)} of them only"
    )
    problem = next(filter(None, problems), uneven if len(set(wanted)) > 1 else "")
    return Finding("settings", problem, "fail", "set the variable on all ranks, or on none") if problem else None


def path(comm: Any) -> Finding:
    """Describe the path between all ranks; collective."""
    name, obstacle = path_of(comm)
    if name in _SHARED_PATHS:
        return Finding("path", f"{name}: {_SHARED_PATHS[name]}")
    if not wants_shared_memory():
        return Finding("path", "plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it")
    if not obstacle:
        return Finding("path", "plain: by MPI alone, as no two ranks are on one node")
    text = "plain: by MPI alone, slower: the ranks of a node cannot share memory\nbecause of " + obstacle
    return Finding("path", text, "warn", remedy(obstacle))


def speed(started: Started) -> Finding:
    """Time an all-reduce of all ranks; collective."""
    assert started.comm is not None
    backend = MpiBackend(started.comm)
    latency, seconds = _seconds(backend, 1), _seconds(backend, SIZE // 4)
    backend.close()
    return judged_speed(latency, seconds, started.topology.num_nodes)


def _seconds(backend: Backend, elements: int) -> float:
    """Return the median time of an all-reduce of this many floats, after one that warms up; collective."""
    tensor, taken = torch.zeros(elements), []
    for _ in range(1 + ROUNDS):
        backend.barrier()
        begun = time.perf_counter()
        backend.all_reduce(tensor)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def judged_speed(latency: float, seconds: float, nodes: int) -> Finding:
    """Return the finding for the seconds of an all-reduce of four bytes and of one of `SIZE` bytes; local."""
    rate = SIZE / seconds
    text = f"4 bytes {latency * 1e6:.0f} µs, {SIZE >> 20} MiB {seconds * 1e3:.2f} ms: {rate / 1e9:.2f} GB/s a rank"
    if rate >= LEAST_SPEED and latency <= MOST_LATENCY:
        return Finding("all-reduce", text)
    if nodes > 1:
        todo = "see `fabric`; choose the interface of MPI, as the page on clusters says"
    else:
        todo = "see `affinity` and `path`; is something else running on the node?"
    return Finding("all-reduce", f"{text}\nslow for {counted(nodes, 'node')}", "warn", todo)
