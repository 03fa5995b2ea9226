"""`axonmpi doctor`: the facts that a user needs when a launch goes wrong.

    axonmpi doctor                     is everything installed, and which mpirun belongs to it?
    mpirun -n 4 axonmpi doctor         does this launcher start one job of four ranks, where are they, and do they
                                       share memory?

Rank 0 prints one report for all ranks. Where each process is a world of its own, the first one of each node prints.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from ..backends import path_of, remedy
from ..errors import LaunchError
from ..launch import start as runtime
from ..launch.check import MpiLibrary
from ..launch.cpu import usable_cores
from ..launch.settings import pretended_node, wants_shared_memory
from ..launch.start import Started
from ..launch.variables import Launcher, detect_launchers
from ..utils.text import counted, in_ranges
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
