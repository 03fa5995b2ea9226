"""A rank that ends before MPI is started, or does not come to it in time, while the others wait in MPI's own start.

    process manager of the node ── rank 0 ── in MPI_Init, which Python cannot interrupt
                                │     └─ this program ── counts the ranks, once a second
                                └─ rank 1 ── has ended, or computes

Process managers leave the others waiting, so the first rank of each node starts this file as a program of its own,
which needs nothing of the package. It ends with that rank, or as soon as MPI has started. It may be that rank which
does not come: ranks 1, 2, 4, 8 and so on of the node do the same, each a little later than the one before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["watched"]

LOOKS = 3
"""So many looks, a second apart, have to agree: the process manager starts one rank after the other."""
LATER = 2
"""The next rank that watches waits for so many looks more."""


@contextlib.contextmanager
def watched(variable: str, size: int, local_rank: int, local_size: int, limit: float) -> Iterator[None]:
    """Let the job end if a rank of this node ends while the `with` block waits, or any rank takes too long; local.

    Args:
        variable: The environment variable that has the rank's number.
        size: Number of ranks.
        local_rank: This rank's number on its node.
        local_size: Number of ranks on this node.
        limit: Seconds that ranks may take; 0 for ever.
    """
    if local_rank & (local_rank - 1):
        yield
        return
    numbers = size, local_size, limit, local_rank.bit_length() * LATER
    command = [sys.executable, "-I", "-S", __file__, variable, *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as watcher:
        try:
            yield
        finally:
            assert watcher.stdin is not None
            watcher.stdin.close()


def _main(variable: str, size: int, local_size: int, limit: float, later: int) -> None:
    rank = os.getppid()
    manager = _manager_of(rank, variable)
    begun, missed = time.monotonic(), 0
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        processes = _processes_below(manager, variable) if manager else {rank: -1}
        # Of a rank in a shell or a wrapper it is that which the manager waits for.
        alive = {number for process, number in processes.items() if _parent_of(process) == manager}
        missed = missed + 1 if manager and len(alive) < local_size else 0
        if missed == LOOKS + later:
            problem = f"{_missing(alive, size, local_size)} ended before axonmpi.init_process_group()"
        elif 0 < limit <= time.monotonic() - begun - later:
            problem = f"{_late(processes, size)} not come to axonmpi.init_process_group() in {limit:g} s"
        else:
            continue
        if os.getppid() == rank:
            sys.stderr.write(
                f"axonmpi: {problem}, which all ranks have to call: the others wait there. The job ends\n"
            )
            sys.stderr.flush()
            for process in processes:  # they wait in MPI, and handle no other signal
                if process != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        return


def _missing(alive: set[int], size: int, local_size: int) -> str:
    here = ", ".join(map(str, sorted(alive)))
    missing = sorted(set(range(size)) - alive) if size == local_size else []
    if not missing:
        return f"one of the {local_size} ranks of this node, of which ranks {here} are left,"
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _late(processes: Mapping[int, int], size: int) -> str:
    """Name the ranks whose processes have not loaded MPI, if they are on this node, and say that they have ..."""
    started = {number for process, number in processes.items() if _has_mpi(process)}
    late = sorted(set(processes.values()) - started)
    if not late or len(set(processes.values())) == size == len(late):
        return "a rank has"
    return f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"


def _has_mpi(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "/libmpi" in Path(f"/proc/{process}/maps").read_text("utf-8", "replace")
    return False


def _manager_of(process: int, variable: str) -> int:
    """Return the process that has started a rank, or a shell or wrapper around it; 0 if that cannot be seen."""
    own = _number_in(process, variable)
    while process > 1 and own:
        process = _parent_of(process)
        if _number_in(process, variable) != own:
            return process
    return 0


def _processes_below(manager: int, variable: str) -> dict[int, int]:
    """Return the processes of the ranks that a process manager has started, with the ranks' numbers."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    numbers = {process: _number_in(process, variable) for process in processes}
    return {
        process: int(number)
        for process, number in numbers.items()
        if number.isdecimal() and _manager_of(process, variable) == manager
    }


def _parent_of(process: int) -> int:
    """Return the parent of a process; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
        return 0 if state in "ZX" else int(parent)
    return 0


def _number_in(process: int, variable: str) -> str:
    """Return the rank's number in the environment of a process; empty if there is none, or it cannot be seen."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name.decode("utf-8", "replace") == variable:
                return value.decode("utf-8", "replace")
    return ""


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
