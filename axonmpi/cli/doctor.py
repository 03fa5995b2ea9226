"""`axonmpi doctor`: what a user needs to know when a launch goes wrong.

    axonmpi doctor                     is everything installed, and which mpirun belongs to it?
    mpirun -n 4 axonmpi doctor         does this launcher start one job of four ranks, where are they, and do they
                                       share memory?

Rank 0 prints one report for all ranks. Where every process is a world of its own, the first one on each node does.
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
from . import parse_arguments

__all__ = ["main"]

_RANKS_SHARED_MEMORY = 16 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_MIB = float(1 << 20)


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
    try:
        started, problem = runtime.start_world(), ""
    except LaunchError as error:
        started, problem = None, str(error)
    library = _library()
    ranks = _rank_lines(started) if started is not None else []
    path: list[str] = []
    if isinstance(library, str):
        problem = problem or f"only a single rank can run: {library}"
    elif started is not None and started.comm is not None and started.topology.size > 1:
        problem = _wrong_settings(started.comm)
        path = [] if problem else _path(started.comm)
    if runtime.speaks_of_launch():
        sections = [
            *_installed(),
            *_mpi(library),
            *_launch(launchers, started, ranks),
            *_shared_memory(started),
            *path,
        ]
        verdict = f"PROBLEM: {problem}" if problem else "All is well."
        sys.stdout.write("\n".join([*sections, "", verdict, ""]))
        sys.stdout.flush()
    return 1 if problem else 0


def _library() -> MpiLibrary | str:
    """Return the MPI library, or why there is none."""
    try:
        return runtime.library_info()
    except LaunchError as error:
        return str(error)


# ---- sections ---------------------------------------------------------------------------------------------------


def _installed() -> list[str]:
    lines = ["installed", _line("python", f"{platform.python_version()}  {sys.executable}")]
    for name in ("axonmpi", "torch", "numpy", "mpi4py"):
        try:
            lines.append(_line(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            lines.append(_line(name, "not installed"))
    return lines


def _mpi(library: MpiLibrary | str) -> list[str]:
    if isinstance(library, str):
        return ["MPI", _line("library", library)]
    on_path = shutil.which("mpirun")
    lines = [
        "MPI",
        _line("library", f"{library.vendor} {library.version} from {library.path or 'an unknown place'}"),
        _line("its mpirun", library.mpirun or "not found beside the library"),
        _line("thread level", _thread_level()),
    ]
    if library.mpirun and on_path and os.path.realpath(on_path) != os.path.realpath(library.mpirun):
        lines.append(_line("on PATH", f"{on_path}: not the library's own mpirun, and it may belong to another MPI"))
    return lines


def _thread_level() -> str:
    """Name the thread level that MPI has granted."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return "not known, MPI was not started"
    return runtime.thread_level(MPI)


def _launch(launchers: Iterable[Launcher], started: Started | None, ranks: Iterable[str]) -> list[str]:
    lines = ["launch"]
    for launcher in launchers:
        seen = " ".join(f"{name}={value}" for name, value in launcher.variables)
        lines.append(_line("seen", f"{launcher.name}: {seen}"))
    if len(lines) == 1:
        lines.append(_line("seen", "no launcher's variables"))
    if started is not None:
        place = started.topology
        nodes = "1 node" if place.num_nodes == 1 else f"{place.num_nodes} nodes"
        lines.append(_line("ranks", f"{place.size} on {nodes}"))
    return [*lines, *ranks]


def _rank_lines(started: Started) -> list[str]:
    """Describe each rank; collective. The lines are rank 0's to print."""
    place = started.topology
    threads = "1 thread" if started.num_threads == 1 else f"{started.num_threads} threads"
    own = _line(
        f"rank {place.rank}",
        f"node {place.node_rank} ({platform.node()}), local rank {place.local_rank} of {place.local_size}, "
        f"CPUs {_ranges(usable_cores())}, {threads} ({started.threads_reason})",
    )
    return [own] if started.comm is None else started.comm.gather(own) or []


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _shared_memory(started: Started | None) -> list[str]:
    """Say how much there is where MPI libraries pass messages between the ranks of a node."""
    try:
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ["memory", _line(_SHARED_MEMORY, "there is none")]
    lines = ["memory", _line(_SHARED_MEMORY, f"{total / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB free")]
    ranks = max(0 if started is None else started.topology.local_size, len(usable_cores()), 2)
    if total < ranks * _RANKS_SHARED_MEMORY:
        lines.append(_line("", f"small for {ranks} ranks: MPI may crash; in a container enlarge it, --shm-size=1g"))
    return lines


def _wrong_settings(comm: Any) -> str:
    """Say what ranks could not agree on if they tried to share memory; collective."""
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


def _path(comm: Any) -> list[str]:
    """Say which way a group of all ranks goes; collective."""
    name, obstacle = path_of(comm)
    if name == "node":
        return [_line("path", "node: through memory that all ranks share")]
    if name == "nodes":
        return [_line("path", "nodes: through memory that the ranks of a node share, by MPI between nodes")]
    if not wants_shared_memory():
        return [_line("path", "plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it")]
    if not obstacle:
        return [_line("path", "plain: by MPI alone, as no two ranks are on one node")]
    return [
        _line("path", "plain: by MPI alone, slower: the ranks of a node cannot share memory"),
        _line("", f"because of {obstacle}"),
        _line("", remedy(obstacle)),
    ]


def _line(name: str, value: str) -> str:
    return f"  {name:13} {value}"
