"""The first connection of GPUs: the unique id, sent over another backend, and errors raised on all ranks.

    1. each rank looks for its GPU and for NCCL; all exchange the results
    2. rank 0 makes a unique id; the id or the error is broadcast
    3. each rank connects, on a thread; rank 0 gathers the outcomes, and sends them to all

A rank that fails in 1 or 2, or in 3 while others wait for it inside NCCL, is the same error on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import NcclError
from ...types import Work
from ...utils.device import Device, device_at, gpu_count
from ...utils.text import text_of_problems
from ...utils.waiting import network_backoff
from ..checks import MAX_TAG
from ..contract import Backend
from ..objects import all_gather_object, broadcast_object
from . import library

_Found = TypeVar("_Found")
_TEXT_BYTES = 2048
"""The most of an error that ranks tell each other."""


def agree_on(host: Backend, find: Callable[[], _Found]) -> list[_Found]:
    """Return the results of `find` on all ranks, in rank order; collective.

    Args:
        host: The ranks.
        find: Called on each.

    Raises:
        NcclError: It raised an error on some rank; on all ranks, naming those that failed.
    """
    problem: Exception | None = None
    found: Any = None
    try:
        found = find()
    except Exception as error:  # whatever it is, the others wait for it
        problem = error
    told = all_gather_object(host, (found, "" if problem is None else str(problem) or type(problem).__name__))
    if text := text_of_problems([message for _, message in told]):
        raise NcclError(text) from problem
    return [value for value, _ in told]


def make_unique_id() -> library.NcclUniqueId:
    """Make an id; local, needs no GPU.

    Raises:
        NcclError: NCCL cannot be loaded, or finds no network.
    """
    nccl = library.load()
    try:
        return library.NcclUniqueId(bytes(nccl.core.get_unique_id()))
    except nccl.failures as error:
        raise library.nccl_error("unique id", error) from error


def exchange_unique_id(
    host: Backend, make: Callable[[], library.NcclUniqueId] = make_unique_id
) -> library.NcclUniqueId:
    """Return an id that rank 0 makes; collective.

    Args:
        host: The ranks.
        make: Makes it.

    Raises:
        NcclError: Rank 0 cannot make one; on all ranks.
    """
    made: tuple[bytes, str] = (b"", "")
    if host.rank == 0:
        try:
            made = (bytes(make()), "")
        except Exception as error:  # whatever it is, the others wait for it
            made = (b"", f"{error}")
    content, problem = broadcast_object(host, made, 0)
    if problem:
        raise NcclError(f"rank 0 of {host.size} could not make a unique id: {problem}")
    return library.NcclUniqueId(content)


def connect_ranks(
    unique_id: library.NcclUniqueId, rank: int, size: int, place: torch.device, host: Backend | None
) -> Any:
    """Return nccl4py's communicator of the ranks that have one id; collective.

    Args:
        unique_id: The id.
        rank: This process's number among them.
        size: How many there are.
        place: This rank's GPU.
        host: The same ranks over their CPUs: a failure is the same error on all of them then.

    Raises:
        NcclError: There is no NCCL or no such GPU, or the ranks cannot reach each other.
    """

    def connect() -> Any:
        _check_visible(place)
        nccl = library.load()
        try:
            return nccl.core.Communicator.init(size, rank, nccl.core.UniqueId.from_bytes(bytes(unique_id)))
        except nccl.failures as error:
            raise library.nccl_error(f"rank {rank} could not connect", error) from error

    if host is not None:
        return connect_all(host, place, connect)
    _check_visible(place)
    with device_at(place).selected():
        return connect()


def connect_own(places: Sequence[torch.device]) -> list[Any]:
    """Return nccl4py's communicators of several GPUs of this process, one a GPU; local.

    Raises:
        NcclError: There is no NCCL, no such GPU, or it cannot be used.
    """
    for place in places:
        _check_visible(place)
    nccl = library.load()
    numbers = [place.index for place in places]
    try:
        return list(nccl.core.Communicator.init_all(numbers))
    except nccl.failures as error:
        raise library.nccl_error(f"GPUs {numbers} could not be connected", error) from error


def _check_visible(place: torch.device) -> None:
    """Raise unless this process sees a GPU."""
    if place.type == "cuda" and place.index >= gpu_count():
        raise NcclError(
            f"device: expected one of {gpu_count()} GPUs that this process sees, got {place.index}; look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def connect_all(host: Backend, place: torch.device, connect: Callable[[], _Found]) -> _Found:
    """Call `connect` on every rank, which returns on all or on none; collective.

    Args:
        host: The ranks. No other messages may be under way there.
        place: The device, current while `connect` runs.
        connect: Blocks until all ranks have called it.

    Raises:
        NcclError: It failed on some rank; on all ranks, naming those that failed.
    """
    attempt = _Attempt(place, connect)
    verdict = _Verdict(host)
    backoff = network_backoff()
    while not verdict.is_known(attempt.outcome):
        host.check_peers("connecting by NCCL")
        backoff.rest()
    verdict.finish()
    if verdict.text:
        raise NcclError(f"the ranks could not connect by NCCL: {verdict.text}") from attempt.error
    value: _Found = attempt.result()
    return value


class _Attempt:
    """A call on a thread of its own, since it may never return."""

    def __init__(self, place: torch.device, connect: Callable[[], Any]) -> None:
        self.outcome: str | None = None
        self.error: Exception | None = None
        self._value: Any = None
        self._thread = threading.Thread(target=self._run, args=(device_at(place), connect), daemon=True)
        self._thread.start()

    def _run(self, device: Device, connect: Callable[[], Any]) -> None:
        try:
            device.use()
            self._value = connect()
            self.outcome = ""
        except Exception as error:
            self.error = error
            self.outcome = str(error) or type(error).__name__

    def result(self) -> Any:
        """Return the value of a call that has returned; local."""
        self._thread.join()
        return self._value


class _Verdict:
    """The outcome on all ranks, or the first failure; rank 0 gathers the outcomes and sends the result to all."""

    def __init__(self, host: Backend) -> None:
        self.text = ""
        self._host = host
        self._told = False
        self._sends: list[tuple[Work, Tensor]] = []
        sources = range(1, host.size) if host.rank == 0 else [0]
        self._receives = {source: self._receive(source) for source in sources}

    def is_known(self, outcome: str | None) -> bool:
        """Return True if all is decided; local.

        Args:
            outcome: This rank's: None while it is open, empty if it succeeded, else the error.
        """
        if self._host.rank == 0:
            return self._decide(outcome)
        if outcome is not None and not self._told:
            self._tell(0, outcome)
        work, content = self._receives[0]
        if not work.done():
            return False
        self.text = _text_of(content)
        return self._told or bool(self.text)

    def finish(self) -> None:
        """Leave no message behind: also ranks whose outcome is open have told rank 0 something; collective."""
        if self._host.rank and not self._told:
            self._tell(0, "another rank has failed")
        for work, _ in (*self._sends, *self._receives.values()):
            work.wait()

    def _decide(self, outcome: str | None) -> bool:
        outcomes = {0: outcome}
        for source, (work, content) in self._receives.items():
            outcomes[source] = _text_of(content) if work.done() else None
        failed = [f"rank {rank}: {text}" for rank, text in outcomes.items() if text]
        if not failed and None in outcomes.values():
            return False
        self.text = "\n".join(failed)
        for rank in range(1, self._host.size):
            self._tell(rank, self.text)
        return True

    def _tell(self, rank: int, text: str) -> None:
        self._told = True
        content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:_TEXT_BYTES]
        content[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
        self._sends.append((self._host.isend(content, rank, MAX_TAG), content))

    def _receive(self, source: int) -> tuple[Work, Tensor]:
        content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        return self._host.irecv(content, source, MAX_TAG), content


def _text_of(content: Tensor) -> str:
    return bytes(content.tolist()).rstrip(b"\0").decode(errors="replace")
