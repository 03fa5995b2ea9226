"""`axonmpi doctor`: the facts that a user needs when a launch goes wrong.

    axonmpi doctor                     is everything installed, and which mpirun belongs to it?
    mpirun -n 4 axonmpi doctor         does this launcher start one job of four ranks, where are they, and do they
                                       share memory, and which GPU has each of them?

Rank 0 prints one report for all ranks. Where each process is a world of its own, the first one of each node prints.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from typing import Any

import torch

from ..backends import check_choices, choose_device, library_text, path_of, remedy
from ..errors import LaunchError, NcclError
from ..launch import start as runtime
from ..launch.check import MpiLibrary
from ..launch.cpu import usable_cores
from ..launch.settings import pretended_node, wants_shared_memory
from ..launch.start import Started
from ..launch.variables import Launcher, detect_launchers
from ..utils.device import device_at, driver_version, gpu_count, peer_access
from ..utils.text import counted, in_ranges, name_ranks
from . import parse_arguments

__all__ = ["main"]

_RANKS_SHARED_MEMORY = 16 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_MIB = float(1 << 20)

Entry = tuple[str, str]
"""A line of the report: a name and what is said of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; collective over all ranks of the job.

    Returns:
        0 if ranks can be started and agree with their launcher, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="axonmpi doctor",
        description="Say what is installed, how this process was launched and whether that works.",
    )
    parse_arguments(parser, argv)
    launchers = detect_launchers()
    started, problem, path = None, "", []
    try:
        started = runtime.start_world()
    except LaunchError as error:
        problem = str(error)
    ranks = [] if started is None else _ranks(started)
    gpus = _gpus(started)
    try:
        mpi = _mpi(runtime.library_info())
        if started is not None and started.comm is not None and started.topology.size > 1:
            problem = _wrong_settings(started.comm)
            path = [] if problem else _path(started.comm)
    except LaunchError as error:
        mpi = [("library", str(error))]
        problem = problem or f"only a single rank can run: {error}"
    if runtime.speaks_of_launch():
        report = {
            "installed": _installed(),
            "MPI": mpi,
            "launch": [*_launch(launchers, started), *ranks],
            "memory": [*_shared_memory(started), *path],
            "GPUs": gpus,
        }
        lines = []
        for title, entries in report.items():
            lines += [title, *(f"  {name:13} {value}" for name, value in entries)]
        verdict = f"PROBLEM: {problem}" if problem else "All is well."
        sys.stdout.write("\n".join([*lines, "", verdict, ""]))
        sys.stdout.flush()
    return 1 if problem else 0


# ---- sections ---------------------------------------------------------------------------------------------------


def _installed() -> list[Entry]:
    entries = [("python", f"{platform.python_version()}  {sys.executable}")]
    for name in ("axonmpi", "torch", "numpy", "mpi4py"):
        try:
            entries.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            entries.append((name, "not installed"))
    return entries


def _mpi(library: MpiLibrary) -> list[Entry]:
    from mpi4py import MPI

    runs = MPI.Is_initialized() and not MPI.Is_finalized()
    entries = [
        ("library", f"{library.vendor} {library.version} from {library.path or 'an unknown place'}"),
        ("its mpirun", library.mpirun or "not found beside the library"),
        ("thread level", runtime.thread_level(MPI) if runs else "not known, MPI was not started"),
    ]
    on_path = shutil.which("mpirun")
    if library.mpirun and on_path and os.path.realpath(on_path) != os.path.realpath(library.mpirun):
        entries.append(("on PATH", f"{on_path}: not the library's own mpirun, and it may belong to another MPI"))
    return entries


def _launch(launchers: Iterable[Launcher], started: Started | None) -> list[Entry]:
    entries = []
    for launcher in launchers:
        variables = " ".join(f"{name}={value}" for name, value in launcher.variables)
        entries.append(("seen", f"{launcher.name}: {variables}"))
    if not entries:
        entries.append(("seen", "no launcher's variables"))
    if started is not None:
        entries.append(("ranks", f"{started.topology.size} on {counted(started.topology.num_nodes, 'node')}"))
    return entries


def _ranks(started: Started) -> list[Entry]:
    """Describe each rank, for rank 0 to print; collective."""
    at = started.topology
    place = f"node {at.node_rank} ({platform.node()}), local rank {at.local_rank} of {at.local_size}"
    cores = f"CPUs {in_ranges(sorted(usable_cores()), ',')}"
    threads = f"{counted(started.num_threads, 'thread')} ({started.threads_reason})"
    own = f"rank {at.rank}", f"{place}, {cores}, {threads}"
    return [own] if started.comm is None else started.comm.gather(own) or []


def _shared_memory(started: Started | None) -> list[Entry]:
    """Describe the memory in which MPI libraries pass messages between the ranks of a node."""
    try:
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return [(_SHARED_MEMORY, "there is none")]
    entries = [(_SHARED_MEMORY, f"{total / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB free")]
    ranks = max(0 if started is None else started.topology.local_size, len(usable_cores()), 2)
    if total < ranks * _RANKS_SHARED_MEMORY:
        entries.append(("", f"small for {ranks} ranks: MPI may crash; in a container enlarge it, --shm-size=1g"))
    return entries


def _wrong_settings(comm: Any) -> str:
    """Return the reason why ranks cannot agree on sharing memory, or nothing; collective."""
    try:
        pretended_node(comm.rank)
        own = (wants_shared_memory(), "")
    except ValueError as error:
        own = (False, str(error))
    wanted, problems = zip(*comm.allgather(own), strict=True)
    uneven = (
        f"AXONMPI_COLLECTIVES: expected the same on all ranks, got 'plain' on {wanted.count(False)} of them only"
    )
    return next(filter(None, problems), uneven if len(set(wanted)) > 1 else "")


def _path(comm: Any) -> list[Entry]:
    """Describe how the data of a group of all ranks travel; collective."""
    name, obstacle = path_of(comm)
    if name == "node":
        return [("path", "node: through memory that all ranks share")]
    if name == "nodes":
        return [("path", "nodes: through memory that the ranks of a node share, by MPI between nodes")]
    if not wants_shared_memory():
        return [("path", "plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it")]
    if not obstacle:
        return [("path", "plain: by MPI alone, as no two ranks are on one node")]
    return [
        ("path", "plain: by MPI alone, slower: the ranks of a node cannot share memory"),
        ("", f"because of {obstacle}"),
        ("", remedy(obstacle)),
    ]


# ---- GPUs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gpu:
    """What a rank finds out about GPUs.

    Attributes:
        count: How many it sees.
        text: Which one it uses, or why none.
        chosen: That one, if there is one.
        peers: Which of those it sees reach each other's memory; told by the first rank of each node.
    """

    count: int
    text: str = ""
    chosen: Any = None
    peers: str = ""


def _gpus(started: Started | None) -> list[Entry]:
    """Describe CUDA, NCCL and the GPU of each rank, for rank 0 to print; collective."""
    own = _own_gpu(started)
    ranks = [own] if started is None or started.comm is None else started.comm.gather(own) or [own]
    if not any(gpu.count for gpu in ranks):
        return [
            ("GPU", "none that this process sees" if torch.version.cuda else "none: torch is built without CUDA")
        ]
    driver = driver_version()
    entries = [("CUDA", f"{torch.version.cuda} of torch" + (f", driver {driver}" if driver else "")), *_nccl()]
    for rank, gpu in enumerate(ranks):
        entries += _in_lines(f"rank {rank}", gpu.text)
    try:
        check_choices([gpu.chosen for gpu in ranks if gpu.chosen is not None])
    except NcclError as error:
        entries += _in_lines("", str(error))
    for text in dict.fromkeys(gpu.peers for gpu in ranks if gpu.peers):
        nodes = name_ranks(rank for rank, gpu in enumerate(ranks) if gpu.peers == text)
        entries.append(("peer access", f"{text}, on the node of {nodes}"))
    return entries


def _own_gpu(started: Started | None) -> _Gpu:
    """Find out about this rank's GPU; local."""
    count = gpu_count()
    if not count:
        return _Gpu(count, "no GPU")
    if started is None:
        return _Gpu(
            count, f"sees {counted(count, 'GPU')}; which one it uses is not known, as no ranks were started"
        )
    at = started.topology
    peers = _peers(count) if at.local_rank == 0 else ""
    try:
        chosen = choose_device(at)
    except NcclError as error:
        return _Gpu(count, f"no GPU that can be used: {error}", None, peers)
    name = device_at(torch.device("cuda", chosen.index)).name
    text = f"local rank {at.local_rank}: GPU {chosen.index} of {count} visible, {name}, {chosen.identity}"
    return _Gpu(count, text, chosen, peers)


def _nccl() -> list[Entry]:
    try:
        return [("NCCL", library_text())]
    except NcclError as error:
        return _in_lines("NCCL", str(error))


def _peers(count: int) -> str:
    """Say which of the GPUs that this process sees reach each other's memory; local."""
    pairs = list(combinations(range(count), 2))
    apart = [pair for pair in pairs if not (peer_access(*pair) and peer_access(*reversed(pair)))]
    if not pairs:
        return "not known, as each process sees one GPU"
    if not apart:
        return f"between all {count} GPUs"
    if len(apart) == len(pairs):
        return f"between none of the {count} GPUs: their data go through the CPU's memory"
    return f"between all {count} GPUs but {', '.join(f'{one} and {other}' for one, other in apart)}"


def _in_lines(name: str, text: str) -> list[Entry]:
    first, *others = text.splitlines()
    return [(name, first), *(("", line.strip()) for line in others)]
