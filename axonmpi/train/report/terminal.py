"""Whether what this process prints is seen on a terminal.

Under a launcher its own output says nothing: MPICH gives each rank a pipe although a person may be looking, Open
MPI a pseudo-terminal although the output may go to a file. What the launcher itself prints to is the answer, and on
Linux an ancestor's open files can be read:

    terminal  <──  mpirun  <── pipe ──  (proxy)  <── pipe or pty ──  rank
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["terminal_width"]

_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"}
_DAEMONS = {"hydra_pmi_proxy", "orted", "prted", "slurmstepd"}
_PROCESSES = Path("/proc")


def terminal_width(stream: TextIO, processes: Path = _PROCESSES) -> int | None:
    """Return the columns of the terminal on which a person sees what is written to `stream`; local.

    Args:
        stream: An open text stream, such as `sys.stdout`.
        processes: Where the system describes its processes.

    Returns:
        The number of columns, or None where no terminal is known to show the stream.
    """
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or not a file at all
        return None
    started = processes / "self"  # by the launcher; this process may be a child of that one
    for ancestor in _ancestors(processes):
        if _name(ancestor) in _LAUNCHERS | _DAEMONS:
            if _target(processes / "self" / "fd" / str(number)) != _target(started / "fd" / "1"):
                break  # somebody in between collects the output
            return _launcher_width(processes)
        started = ancestor
    return _width(number)


def _launcher_width(processes: Path) -> int | None:
    """Return the width of the terminal that the launcher prints to; None if it runs on another node."""
    launchers = (ancestor for ancestor in _ancestors(processes) if _name(ancestor) in _LAUNCHERS)
    target = next((_target(launcher / "fd" / "1") for launcher in launchers), "")
    if not target.startswith(("/dev/pts/", "/dev/tty")):
        return None
    try:
        with open(target, "rb", buffering=0, opener=_without_adopting) as terminal:
            return _width(terminal.fileno())
    except OSError:
        return None


def _without_adopting(path: str, flags: int) -> int:
    """Open a terminal without making it this process's own."""
    return os.open(path, flags | os.O_NOCTTY)


def _width(number: int) -> int | None:
    try:
        return os.get_terminal_size(number).columns or None
    except OSError:
        return None


def _ancestors(processes: Path) -> Iterator[Path]:
    """Yield the folders of this process's ancestors, its parent first."""
    pid = os.getppid()
    while pid > 1:
        folder = processes / str(pid)
        yield folder
        fields = _read(folder / "stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0


def _name(process: Path) -> str:
    return _read(process / "comm").strip()


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
