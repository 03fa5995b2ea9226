"""Children of a rank, such as DataLoader workers: they lose the launcher's variables, and may not start MPI.

MPI belongs to the process that the launcher started. A child that inherits the launcher's variables would look like
that rank again, and would hang or bring the job down if it started MPI. So once a rank has started MPI,

    os.fork                     the child drops the launcher's variables
    spawn, forkserver           the helper process and the workers are started without the launcher's variables

and both carry the rank's number, by which a start of MPI is refused with an explanation. Neither is bound to the
core of its rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from ..errors import LaunchError
from .cpu import release_core
from .launcher_variables import child_environment, launched_ranks, parent_rank, turn_into_child

_own_rank: int | None = None
_forked = False


def drop_launcher_variables(rank: int) -> None:
    """Drop the launcher's variables in children of this process, which is rank `rank`; local, once."""
    global _own_rank
    if _own_rank is not None:
        return
    _own_rank = rank
    os.register_at_fork(after_in_child=_become_child)
    # multiprocessing starts workers, its fork server and its resource tracker by this function alone.
    multiprocessing.util.spawnv_passfds = _spawn


def _become_child() -> None:
    global _forked
    assert _own_rank is not None
    _forked = True
    turn_into_child(_own_rank)


def _spawn(path: str | bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a program as multiprocessing does, without the launcher's variables; return its process number."""
    rank = None if _forked else _own_rank
    child = subprocess.Popen(
        [os.fsencode(arg) for arg in args],
        executable=os.fsencode(path),
        pass_fds=tuple(passfds),
        env=None if rank is None else child_environment(rank),
        restore_signals=False,
    )
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        release_core(child.pid)
    child.returncode = 0  # multiprocessing waits for the process itself, so subprocess has to forget it
    return child.pid


def refuse_child() -> None:
    """Raise if this process must not start MPI because a rank has forked or spawned it; local.

    Raises:
        LaunchError: It is a child of a rank.
    """
    rank = parent_rank()
    # With a launcher's variables of its own, a child's child has been started as a rank of a new job.
    if _forked or (rank is not None and launched_ranks() == 1):
        parent = f"rank {rank}"
    elif multiprocessing.parent_process() is not None and launched_ranks() > 1:
        parent = "a rank of the job"
    else:
        return
    raise LaunchError(
        f"this process was forked or spawned by {parent}, and MPI belongs to that rank alone: "
        "communicate in the rank itself, not in its DataLoader workers or other child processes"
    )
