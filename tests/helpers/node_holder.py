"""A process that keeps the namespaces of a node alive until its input ends, and then ends all that runs in them.

The input is a pipe from the test session: it ends with the session, however that ends.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def processes_in(network: str) -> set[int]:
    """Return the ids of the processes in a network namespace, as /proc names it."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.readlink(entry / "ns/net") == network:
                found.add(int(entry.name))
    return found


def kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def main() -> None:
    print("ready", flush=True)
    sys.stdin.read()
    network = os.readlink("/proc/self/ns/net")
    # Again and again, since processes may start others meanwhile.
    while others := processes_in(network) - {os.getpid()}:
        kill(others)


if __name__ == "__main__":
    main()
