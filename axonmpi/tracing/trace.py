"""A trace of a job: begun and ended on all ranks together, in a folder that all nodes see."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ..backends import Backend, all_gather_number, all_gather_object, broadcast_object
from ..launch.topology import Topology
from ..record import Phase, describe, own_record, phase
from ..record.trace_file import FILE_NAME
from ..utils.arguments import check_flags, integer
from ..utils.text import text_of_problems
from .clocks import BACK, THERE
from .merge import MERGED_NAME, PROFILE_NAME, merge
from .rank_trace import trace_files
from .summary import LINK, Summary

_MOST_MESSAGES, _QUICK, _SPREAD = 1024, 32, 1.2
"""Messages there and back that align the clock of a node: until so many took at most that much of the best."""
_PHASES = {each.name.lower(): each for each in Phase if each not in (Phase.OTHER, Phase.ENDING)}
_LINK_BYTES, _LINK_MESSAGES = 1 << 18, 8
"""Messages from each node to the next, besides a first one, whose time shows the bandwidth."""
_TAG = 32767


class Trace:
    """A trace, to be used as a context; made by `axonmpi.trace`.

    Attributes:
        folder: The folder.
        summary: The summary, on rank 0 after the end.

    Args:
        backend: Of the world.
        topology: This rank's node.
        folder: Folder for the files of all ranks, the same on all.
        steps: Steps to trace, counted by `step()` from 0; None traces the whole block.
        profiler: True to record torch's own profiler, too.
    """

    def __init__(
        self, backend: Backend, topology: Topology, folder: Path, steps: range | None = None, profiler: bool = False
    ) -> None:
        check_flags(profiler=profiler)
        self.folder = folder
        self.summary: Summary | None = None
        self._backend, self._topology = backend.control, topology
        self._name, self._steps, self._step = backend.name, steps, 0
        self._profiler = torch.profiler.profile() if profiler else None
        self._runs = False
        self._measured = 0

    def __enter__(self) -> Trace:
        if self._steps is None or 0 in self._steps:
            self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and self._runs:
                self.end()
        finally:  # another rank may have failed
            self.stop()

    def step(self) -> None:
        """Say that a step has ended; collective if the trace begins or ends, else local."""
        self._step += 1
        if self._steps is None:
            return
        if self._runs and self._step not in self._steps:
            self.end()
        elif not self._runs and self._step in self._steps:
            self.begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which this rank is in a phase, for parts of a program that no wrapper sees; local.

        Args:
            name: `"data"`, `"forward"`, `"backward"`, `"optimizer"` or `"checkpoint"`.

        Raises:
            ValueError: There is no such phase.
        """
        if name not in _PHASES:
            raise ValueError(f"name: expected one of {', '.join(map(repr, _PHASES))}, got {name!r}")
        return phase(_PHASES[name])

    def begin(self) -> None:
        """Begin to trace; collective.

        Raises:
            RuntimeError: The rank is traced already.
            OSError: A rank cannot write to the folder, or does not see the files of rank 0; on all ranks.
        """
        backend, folder = self._backend, self.folder
        if own_record().trace is not None:
            raise RuntimeError(
                "this rank is traced already, by AXONMPI_TRACE or another trace: end that one before"
            )
        job: str = broadcast_object(backend, secrets.token_hex(8))
        self._on_all(_prepare, folder if backend.rank == 0 else None)
        identity = {
            "trace": job,
            "rank": backend.rank,
            "size": backend.size,
            "node": self._topology.node_rank,
            "backend": self._name,
            "wall_clock": time.time_ns() - time.monotonic_ns(),
        }
        self._on_all(own_record().begin_trace, folder, identity)
        self._on_all(_check_visible, folder)
        self._runs = True
        if self._profiler is not None:
            self._profiler.start()
        self._measure_network()

    def end(self) -> None:
        """End the trace and write the merged file, on rank 0; collective.

        Raises:
            OSError: Rank 0 cannot read the traces, or cannot write the file; on all ranks.
        """
        self._backend.barrier()  # traced: the wait for a rank that is late at the end
        self._measure_network()
        self.stop()
        self._backend.barrier()
        self._on_all(self._merge, self.folder if self._backend.rank == 0 else None)

    def stop(self) -> None:
        """Complete this rank's file, without the other ranks; local."""
        if self._runs:
            self._runs = False
            own_record().end_trace()
            if self._profiler is not None:
                self._profiler.stop()
                self._profiler.export_chrome_trace(str(self.folder / PROFILE_NAME.format(self._backend.rank)))

    def _merge(self, folder: Path) -> None:
        self.summary = merge(folder)

    def _on_all(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function, unless its first argument is None, and raise its error on all ranks; collective."""
        problem = ""
        if args[0] is not None:
            try:
                function(*args)
            except (OSError, ValueError) as error:
                problem = str(error)
        if text := text_of_problems(all_gather_object(self._backend, problem)):
            own_record().end_trace()
            raise OSError(f"trace in {self.folder}: {text}")

    def _measure_network(self) -> None:
        """Align the nodes' clocks, and measure the way from each node to the next, by messages; collective."""
        topology, backend = self._topology, self._backend
        if topology.num_nodes == 1:
            return
        leaders = np.flatnonzero(all_gather_number(backend, topology.local_rank) == 0).tolist()
        is_leader, own = topology.local_rank == 0, topology.node_rank
        if is_leader:
            for other in leaders[1:] if own == 0 else [backend.rank]:
                self._exchange(leaders[0], other)
            self._measured += 1
        backend.barrier()
        if is_leader:
            self._stream(leaders[(own + 1) % len(leaders)], leaders[own - 1])
        backend.barrier()

    def _stream(self, after: int, before: int) -> None:
        """Send messages to one rank and receive them from another one; collective over the first ranks of nodes."""
        backend, data = self._backend, torch.zeros(_LINK_MESSAGES + 1, _LINK_BYTES, dtype=torch.uint8)
        received = torch.empty_like(data)
        sent = [backend.isend(each, after, _TAG) for each in data]
        first, *others = [backend.irecv(each, before, _TAG) for each in received]
        first.wait()  # both sides are there now
        with backend.notes.noted(describe(LINK.decode(), peer=before, nbytes=_LINK_MESSAGES * _LINK_BYTES), 0):
            for work in others:
                work.wait()
        for work in sent:
            work.wait()

    def _exchange(self, first: int, other: int) -> None:
        """Send messages there and back between two ranks until many are quick; collective over the two."""
        backend, message = self._backend, torch.zeros(1, dtype=torch.uint8)
        is_first, took = backend.rank == first, list[float]()
        for number in range(self._measured * _MOST_MESSAGES, (self._measured + 1) * _MOST_MESSAGES):
            if is_first:
                took.sort()
                message[0] = len(took) > _QUICK and took[_QUICK] < _SPREAD * took[0]
                began = time.monotonic()
                with backend.notes.noted(describe(THERE.decode(), peer=other, tag=number), 0):
                    backend.send(message, other, _TAG)
                    backend.recv(message, other, _TAG)
                took.append(time.monotonic() - began)
            else:
                backend.recv(message, first, _TAG)
                with backend.notes.noted(describe(BACK.decode(), peer=first, tag=number), 0):
                    backend.send(message, first, _TAG)
            if message[0]:
                break


def checked_steps(steps: object) -> range | None:
    """Return the steps of a user's argument; None for all; local.

    Raises:
        TypeError: It is neither a number, nor a range, nor None.
        ValueError: It has no step, or gaps.
    """
    if steps is None:
        return None
    if isinstance(steps, range):
        if not steps or steps.step != 1 or steps.start < 0:
            raise ValueError(f"steps: expected a range of consecutive steps from 0 on, got {steps}")
        return steps
    number = integer("steps", steps)
    if number < 1:
        raise ValueError(f"steps: expected at least 1 step, got {number}")
    return range(number)


def _prepare(folder: Path) -> None:
    """Make the folder, and remove the files of an earlier trace."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*trace_files(folder), *folder.glob(PROFILE_NAME.format("[0-9]*")), folder / MERGED_NAME):
        path.unlink(missing_ok=True)


def _check_visible(folder: Path) -> None:
    if not (folder / FILE_NAME.format(0)).exists():
        raise FileNotFoundError("rank 0's file is not there: take a folder on a file system of all nodes")
