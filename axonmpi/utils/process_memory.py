"""Memory of this process, and memory available on its node, as Linux counts it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SAMPLE_SECONDS = 0.005


def process_memory() -> tuple[int, int]:
    """Return the process's proportional set size and the high-water mark of its resident set, in bytes; local.

    Zeros on systems without `/proc`.
    """
    return _bytes_of("/proc/self/smaps_rollup", "Pss:"), _bytes_of("/proc/self/status", "VmHWM:")


def peak_growth(call: Callable[[], object]) -> int:
    """Return by how many bytes the resident set grows at most in a call; local, 0 on systems without `/proc`."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark becomes the present
    before = process_memory()[1]
    call()
    return process_memory()[1] - before


def available_memory() -> int:
    """Return how many bytes this process can still allocate on its node; local.

    Limits of control groups, version 2, count. Without `/proc` the result is `sys.maxsize`.
    """
    limits = [_bytes_of("/proc/meminfo", "MemAvailable:") or sys.maxsize]
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].removeprefix("0::/")
        for folder in (Path(own), *Path(own).parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                limits.append(int(Path("/sys/fs/cgroup", folder, "memory.max").read_text(encoding="ascii")))
    return min(limits)


def _bytes_of(path: str, key: str) -> int:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


class PeakMemory:
    """The largest memory of this process during a `with` block, sampled by a thread.

    Attributes:
        most: Its largest proportional set size so far, in bytes.
    """

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        pause = _SAMPLE_SECONDS
        while not self._ended.wait(pause):
            begun = time.perf_counter()
            self.most = max(self.most, process_memory()[0])
            # The kernel counts page by page and blocks the process's page faults meanwhile.
            pause = max(_SAMPLE_SECONDS, 20 * (time.perf_counter() - begun))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, process_memory()[0])
