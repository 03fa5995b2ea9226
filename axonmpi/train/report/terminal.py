"""Search for the terminal that shows this process's output.

Under a launcher the process's own output does not tell: with MPICH it is a pipe although the launcher may print to
a terminal, with Open MPI it is a pseudo-terminal although the launcher may print to a file. On Linux the launcher
is among the process's ancestors, and its output can be looked up:

    terminal  <──  mpirun  <── pipe ──  (proxy)  <── pipe or pseudo-terminal ──  rank
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"}
_DAEMONS = {"hydra_pmi_proxy", "orted", "prted", "slurmstepd"}
_PROCESSES = Path("/proc")


def terminal_width(stream: TextIO, processes: Path = _PROCESSES) -> int | None:
    """Return the columns of the terminal that shows a stream; local.

    Args:
        stream: An open text stream, such as `sys.stdout`.
        processes: The folder in which the system describes its processes.

    Returns:
        The number of columns, or None if no terminal is known to show the stream.
    """
    try:
        shown = _output_of_launcher(stream.fileno(), processes)
        if shown is None:
            return os.get_terminal_size(stream.fileno()).columns or None
        with open(shown, "rb", buffering=0, opener=_without_adopting) as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # closed, no file at all, or no terminal
        return None


def _output_of_launcher(number: int, processes: Path) -> Path | None:
    """Return the output of the launcher that passes on this process's output; None without a launcher.

    Args:
        number: File descriptor of this process's output.
        processes: The folder in which the system describes its processes.

    Raises:
        OSError: The launcher is on another node, or a program between it and this process collects the output.
    """
    ancestors = dict(_ancestors(processes))
    started = processes / "self"  # by the launcher or its daemon: this process or an ancestor of it
    for ancestor, name in ancestors.items():
        if name in _LAUNCHERS | _DAEMONS:
            if os.readlink(processes / "self" / "fd" / str(number)) != os.readlink(started / "fd" / "1"):
                raise OSError("another program collects the output")
            launchers = [folder for folder, name in ancestors.items() if name in _LAUNCHERS]
            if not launchers:
                raise OSError("the launcher is on another node")
            return launchers[0] / "fd" / "1"
        started = ancestor
    return None


def _ancestors(processes: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder and the name of each ancestor that can be read, the parent first."""
    pid = os.getppid()
    while pid > 1:
        folder = processes / str(pid)
        try:
            yield folder, (folder / "comm").read_text().strip()
            pid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return


def _without_adopting(path: str, flags: int) -> int:
    """Open a terminal without making it this process's controlling terminal, and a pipe without waiting."""
    return os.open(path, flags | os.O_NOCTTY | os.O_NONBLOCK)
