"""Processes of this machine, as /proc shows them: state, parent, start time, mapped files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that has not ended, at one moment.

    Attributes:
        state: A letter, as `ps` shows it: `T` is stopped by a signal such as SIGSTOP, `t` is stopped by a debugger.
        parent: Process number of the parent.
        started: Start time, in clock ticks since the machine started; tells apart two processes with one number.
    """

    state: str
    parent: int
    started: int


def process(number: int) -> Process | None:
    """Return the process with a number; None if it has ended, zombies included, or never was; local."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()  # the program's name may have any character
    return None if words[0] in "ZX" else Process(words[0], int(words[1]), int(words[19]))


def age(started: int) -> float:
    """Return the seconds since the start of a process, from its `started`; local."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def traced_by(number: int) -> int:
    """Return the process number of a process's debugger, 0 without one; local."""
    try:
        status = Path(f"/proc/{number}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("TracerPid:")), "0")
    return int(line.split()[-1])


def namespace() -> int:
    """Return the id of this process's PID namespace, 0 if unknown; local.

    Process numbers mean the same only to processes of one namespace.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def mapped_files() -> dict[Path, int]:
    """Return the files that this process has mapped, with their inodes; empty without /proc; local."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split(maxsplit=5) for line in lines if line.count("/")]
    return {Path(path): int(inode) for *_, inode, path in fields}
