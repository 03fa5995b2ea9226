"""The PMI connection of the next rank of the node, held open so that a lost rank can be named, under MPICH.

The daemon of MPICH's `mpirun` on a node takes a closed connection of a rank for the end of the job: it kills the
other ranks at once, and if the rank has left by `os._exit(0)`, the job ends with exit code 0 and no message, or, on
several nodes, not at all. So each rank also holds the connection of the next rank of its node open. When that rank
has gone, the others raise an error, or the watchdog ends the job; both with an exit code and a message.

A process with the connection can start programs as the job's user. So it is sent through a socket in the folder of
records, which no other user can open. Ranks cannot inherit it, since they have no parent of the library, and
`pidfd_getfd` needs the rights of a debugger, which Yama and containers withhold.
"""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path
from typing import Any

from .launcher_variables import detect_launchers, number_in

_SECONDS = 5.0
"""Time limit for the next rank's connection, once all ranks of the node have their sockets."""

_held: list[int] = []


def hold(node: Any, folder: Path, job: str) -> str:
    """Hold the connection of the next rank of this node; collective over the node, does nothing elsewhere.

    Args:
        node: Communicator of the node's ranks.
        folder: Folder of records, checked.
        job: Name of the job.

    Returns:
        The reason if this rank cannot hold the connection; empty if it does, or need not.
    """
    own = number_in(None, "PMI_FD")
    if own is None or node.size == 1 or all(launcher.name != "MPICH" for launcher in detect_launchers()):
        return ""
    paths = [folder / f"{job}-{rank}.line" for rank in range(node.size)]
    path, path_before = paths[node.rank], paths[node.rank - 1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.settimeout(_SECONDS)
        reason = _reason_of(line.bind, str(path))
        if any(node.allgather(reason)):
            return reason
        files = array.array("i", [own])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        reason = _reason_of(line.sendmsg, [b"x"], rights, 0, str(path_before)) or _reason_of(_receive, line)
        path.unlink()
    return reason


def _receive(line: socket.socket) -> None:
    _, files, _, _ = socket.recv_fds(line, 1, 1)
    for file in files:
        os.set_inheritable(file, False)
    _held.extend(files)


def _reason_of(action: Any, *arguments: Any) -> str:
    """Run an action; return the reason if it fails, else an empty text."""
    try:
        action(*arguments)
    except OSError as error:
        return f"a rank that leaves by os._exit may end the job with code 0: no socket between ranks: {error}"
    return ""
