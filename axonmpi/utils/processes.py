"""What the system knows of a process of this machine: whether it runs, is stopped, has ended; read from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        number: Its process number.
        state: A letter, as `ps` shows it: `R`, `S` and `D` live, `T` is stopped, `Z` and `X` have ended.
        parent: The number of its parent.
        started: When it has started, in ticks since the machine has: a number is given to another process later.
        ticks: Processor time that it has used.
    """

    number: int
    state: str
    parent: int
    started: int
    ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more; a zombie does not."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, such as SIGSTOP; a debugger's stop is another state."""
        return self.state == "T"


def process(number: int) -> Process | None:
    """Return what the system knows of a process; None if it knows none of that number; local."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()  # its name may have anything in it
    return Process(number, words[0], int(words[1]), int(words[19]), int(words[11]) + int(words[12]))


def age(started: int) -> float:
    """Return how many seconds ago a process has started, from its `started`; local."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def traced_by(number: int) -> int:
    """Return the number of the debugger that a process is in, 0 if there is none; local."""
    try:
        status = Path(f"/proc/{number}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("TracerPid:")), "0")
    return int(line.split()[-1])


def namespace() -> int:
    """Return what tells whether two processes know each other by the same numbers, 0 if it is unknown; local."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
