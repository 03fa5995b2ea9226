"""A program that watches the ranks of a node while they wait in MPI_Init for ranks that never come.

    process manager of the node ── rank 0 ── in MPI_Init, which Python cannot interrupt
                                │     └─ this program ── counts the manager's processes, once a second
                                └─ rank 1 ── has ended, or computes

Process managers leave the others waiting if a rank ends before it starts MPI, or does not start it in time. So the
first rank of each node starts this file as a program, which imports nothing of the package. It ends with that rank,
or as soon as MPI has started. If the first rank itself does not come, others watch: ranks 1, 2, 4, 8 and so on of
the node do the same, each a little later than the one before.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOKS = 3
"""Number of checks, a second apart, that have to agree: the process manager starts one rank after the other."""
LATER = 2
"""Number of further checks for each further rank that watches."""
MANAGERS = ("hydra_pmi_proxy", "prterun", "prted", "mpirun", "mpiexec", "orterun", "orted", "slurmstepd")
"""Programs that start the ranks of a node, each as a process. Under other programs only the time limit holds."""


@contextlib.contextmanager
def watched(variable: str, size: int, local_rank: int, local_size: int, limit: float) -> Iterator[None]:
    """Watch the ranks of this node during a `with` block: a rank that has ended or is late ends the job; local.

    Args:
        variable: Environment variable of a rank's number.
        size: Number of ranks.
        local_rank: This rank's number on its node.
        local_size: Number of ranks on this node.
        limit: Time limit for the ranks' arrival in seconds; 0 for none.
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


# ---- the program ------------------------------------------------------------------------------------------------


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
    """Name the ranks of this node that have not loaded MPI, followed by "has" or "have"."""
    known = set(numbers.values())
    come = {number for process, number in numbers.items() if "/libmpi" in _text(process, "maps")}
    late = sorted(known - come)
    if not late or len(late) == size:
        return "a rank has"
    return f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _text(process: int, file: str) -> str:
    """Return a file of a process in /proc; empty if the process has ended or is another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{file}").read_text("utf-8", "replace")
    return ""


def _numbers_below(manager: int, variable: str) -> dict[int, int]:
    """Return the ranks that a manager has started, by process, those in shells and wrappers included."""
    pattern = re.compile(rf"(?<![^\0]){variable}=(\d+)(?![^\0])")
    numbers = {}
    for process in _processes() if manager else []:
        number = pattern.search(_text(process, "environ"))
        if number and _manager_of(process) == manager:
            numbers[process] = int(number[1])
    return numbers


def _manager_of(process: int) -> int:
    """Return the process that has started a rank, or a shell or wrapper around the rank; 0 if not visible."""
    while process > 1:
        process = _parent_of(process)
        if _text(process, "comm").strip() in MANAGERS:
            return process
    return 0


def _parent_of(process: int) -> int:
    """Return the parent of a process; 0 for a process that has ended."""
    fields = _text(process, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields and fields[0] not in "ZX" else 0


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
