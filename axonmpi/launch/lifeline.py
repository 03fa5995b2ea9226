"""Time for the others to say that a rank has gone, under MPICH's `mpirun`.

Its daemon on a node takes a closed connection of a rank for the end of the job: it kills the other ranks at once,
and if the rank has left by `os._exit(0)` the job ends with exit code 0 and no word, or, on several nodes, not at
all. So each rank holds the connection of the next rank of its node open, too. When that one goes, the others raise
an error, or the watchdog ends the job; in both cases the exit code tells.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from .variables import detect_launchers, number_in

__all__ = ["hold"]

_SECONDS = 5.0
"""How long a rank waits for the connection of its neighbour, which is there at once or never."""

_held: list[int] = []


def hold(node: Any, job: str) -> None:
    """Hold the connection of the next rank of this node; collective over them, does nothing elsewhere.

    Args:
        node: Communicator of the node's ranks.
        job: Name of the job.
    """
    own = number_in(None, "PMI_FD")
    if own is None or node.size == 1 or all(launcher.name != "MPICH" for launcher in detect_launchers()):
        return
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as before:
        listener.settimeout(_SECONDS)
        with contextlib.suppress(OSError):
            listener.bind(_address(job, node.rank))
            listener.listen(1)
        node.Barrier()
        with contextlib.suppress(OSError):  # ranks in containers of their own have no such sockets in common
            before.connect(_address(job, (node.rank - 1) % node.size))
            socket.send_fds(before, [b"x"], [own])
            following, _ = listener.accept()
            with following:
                following.settimeout(_SECONDS)
                _, files, _, _ = socket.recv_fds(following, 1, 1)
            for file in files:
                os.set_inheritable(file, False)
            _held.extend(files)


def _address(job: str, rank: int) -> str:
    """The name of a socket that is in no folder."""
    return f"\0axonmpi-{job}-{rank}"
