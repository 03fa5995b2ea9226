"""A rank that ends before MPI is started, or does not come to it in time, while the others wait in MPI's own start.

    process manager of the node ── rank 0 ── in MPI_Init, which Python cannot interrupt
                                │     └─ this program ── counts the manager's processes, once a second
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
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOKS = 3
"""So many looks, a second apart, have to agree: the process manager starts one rank after the other."""
LATER = 2
"""The next rank that watches waits for so many looks more."""
MANAGERS = ("hydra_pmi_proxy", "prterun", "prted", "mpirun", "mpiexec", "orterun", "orted", "slurmstepd")
"""Programs that start the ranks of a node, each as a process of its own. Under others only the limit holds."""


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
    numbers = size, local_size, limit, local_rank.bit_length() * LATER
    command = [sys.executable, "-I", "-S", __file__, variable, *map(str, numbers)]
    with contextlib.ExitStack() as stack:
        if not local_rank & (local_rank - 1):
            with contextlib.suppress(OSError):  # no more processes are allowed: nobody watches
                watcher = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
                assert watcher.stdin is not None
                stack.callback(watcher.stdin.close)
        yield


def _main(variable: str, size: int, local_size: int, limit: float, later: int) -> None:
    rank = os.getppid()
    manager = _manager_of(rank)
    looks = missed = 0
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        looks += 1
        numbers = _numbers_below(manager, variable)
        count = sum(_parent_of(process) == manager for process in _processes()) if manager else local_size
        missed = missed + 1 if count < local_size else 0
        if missed == LOOKS + later:
            problem = f"{_missing(numbers, size, local_size)} ended before axonmpi.init_process_group()"
        elif 0 < limit <= looks - later:
            problem = f"{_late(numbers, size)} not come to axonmpi.init_process_group() in {limit:g} s"
        else:
            continue
        if os.getppid() == rank:
            sys.stderr.write(
                f"axonmpi: {problem}, which all ranks have to call: the others wait there. The job ends\n"
            )
            sys.stderr.flush()
            # They wait in MPI, and handle no other signal. Ranks of another job are not touched.
            for process in numbers if count <= local_size else [rank]:
                if process != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        return


def _missing(numbers: Mapping[int, int], size: int, local_size: int) -> str:
    """Name the ranks that have no process any more."""
    left = sorted(set(numbers.values()))
    missing = sorted(set(range(size)) - set(left)) if size == local_size else []
    if not missing:
        return f"one of the {local_size} ranks of this node, of which ranks {', '.join(map(str, left))} are left,"
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _late(numbers: Mapping[int, int], size: int) -> str:
    """Name the ranks that have not loaded MPI, if they are on this node, and say that they have ..."""
    known = set(numbers.values())
    late = sorted(known - {number for process, number in numbers.items() if _has_mpi(process)})
    if not late or len(late) == size:
        return "a rank has"
    return f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"


def _has_mpi(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "/libmpi" in Path(f"/proc/{process}/maps").read_text("utf-8", "replace")
    return False


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _numbers_below(manager: int, variable: str) -> dict[int, int]:
    """Return the numbers of the ranks that a manager has started, by process, also in shells and wrappers."""
    found = {}
    for process in _processes() if manager else []:
        number = _number_in(process, variable)
        if number.isdecimal() and _manager_of(process) == manager:
            found[process] = int(number)
    return found


def _manager_of(process: int) -> int:
    """Return the process that has started a rank, or a shell or wrapper around it; 0 if that cannot be seen."""
    while process > 1:
        process = _parent_of(process)
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text("utf-8", "replace").strip() in MANAGERS:
                return process
    return 0


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
