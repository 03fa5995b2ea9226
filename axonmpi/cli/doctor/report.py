"""The report of `axonmpi doctor`, in sections of findings.

Rank 0 prints one report for all ranks. If each process is a world of its own, the first of each node prints.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from ...errors import LaunchError
from ...launch import start as runtime
from ...launch.check import MpiLibrary
from ...launch.launcher_variables import Launcher, detect_launchers, missing_of_torchrun
from ...launch.start import Started
from ...utils.text import counted
from ..arguments import parse_arguments
from .findings import Finding, as_json, as_text, problem_of
from .gpus import gpus
from .limits import limits
from .memory import leftovers, shared_memory
from .network import fabric, path, speed, wrong_settings
from .ranks import affinity, clocks, locations


def main(argv: Sequence[str]) -> int:
    """Print the report; collective over all ranks of the job.

    Returns:
        0 if ranks can be started and agree with their launcher, with or without warnings, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="axonmpi doctor",
        description="Say what is installed, how this process was launched and whether that works.",
        epilog="The exit code is 0 where no line says fail.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parse_arguments(parser, argv)
    report = _examine()
    if runtime.reports_launch_errors():
        sys.stdout.write(as_json(report) + "\n" if options.json else as_text(report))
        sys.stdout.flush()
    return int(bool(problem_of(report)))


def _examine() -> dict[str, list[Finding]]:
    """Return the sections of the report; collective. Complete on rank 0; all ranks have the failures."""
    launchers = detect_launchers()
    started, failed = None, []
    try:
        started = runtime.start_world()
    except LaunchError as error:
        failed.append(Finding("problem", str(error), "fail", "start the ranks as it says"))
    try:
        mpi = _mpi(runtime.library_info())
    except LaunchError as error:
        text = f"only a single rank can run: {error}"
        mpi = [Finding("library", text, "fail", "install or load an MPI library")]
    report = {
        "installed": _installed(),
        "MPI": mpi,
        "launch": [
            *_launch(launchers, started),
            *failed,
            *locations(started),
            *affinity(started),
            *clocks(started),
        ],
        "limits": limits(started),
        "memory": [*shared_memory(started), *leftovers(started)],
        "network": [*fabric(started)],
        "GPUs": gpus(started),
    }
    if started is not None and started.comm is not None and started.topology.size > 1:
        problem = wrong_settings(started.comm)
        report["network"] += [problem] if problem else [path(started.comm), speed(started)]
    return report


def _installed() -> list[Finding]:
    findings = [Finding("python", f"{platform.python_version()}  {sys.executable}")]
    for name in ("axonmpi", "torch", "numpy", "mpi4py"):
        try:
            findings.append(Finding(name, str(import_module(name).__version__)))
        except ImportError:
            findings.append(Finding(name, "not installed", "warn", f"pip install {name}"))
    return findings


def _mpi(library: MpiLibrary) -> list[Finding]:
    from mpi4py import MPI

    runs = MPI.Is_initialized() and not MPI.Is_finalized()
    findings = [
        Finding("library", f"{library.vendor} {library.version} from {library.path or 'an unknown place'}"),
        Finding("its mpirun", library.mpirun or "not found beside the library"),
        Finding("thread level", runtime.thread_level(MPI) if runs else "not known, MPI was not started"),
    ]
    on_path = shutil.which("mpirun")
    if library.mpirun and on_path and os.path.realpath(on_path) != os.path.realpath(library.mpirun):
        text = f"{on_path}: not the library's own mpirun, and it may belong to another MPI"
        findings.append(Finding("on PATH", text, "warn", f"start ranks by {library.mpirun}"))
    return findings


def _launch(launchers: Iterable[Launcher], started: Started | None) -> list[Finding]:
    findings = []
    for launcher in launchers:
        variables = " ".join(f"{name}={value}" for name, value in launcher.variables)
        findings.append(Finding("seen", f"{launcher.name}: {variables}"))
    if not findings:
        findings.append(Finding("seen", "no launcher's variables"))
    if started is not None:
        at = started.topology
        findings.append(Finding("ranks", f"{at.size} on {counted(at.num_nodes, 'node')}"))
        missing = missing_of_torchrun()
        if missing and at.size > 1:
            text = f"not set: {', '.join(missing)}; a script for torchrun needs them: axonmpi run SCRIPT"
            findings.append(Finding("torchrun", text))
    return findings
