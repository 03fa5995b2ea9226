"""A log of the operations that a rank runs, in place of its record."""

import contextlib
from collections.abc import Iterator
from typing import Any

import axonmpi as ax
from axonmpi.record import NoLog
from axonmpi.record.layout import DESCRIPTION


class Log(NoLog):
    """Keeps the name and bytes of each operation, waits left out; `enter` returns an index of `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def enter(self, description: bytes, number: int | None = None) -> int:
        self.calls.append(name_and_bytes(description))
        return len(self.calls) - 1

    def fail(self, at: int) -> None:
        self.leave(at)


def name_and_bytes(description: bytes) -> tuple[str, int]:
    """Return the operation's name and the bytes of the rank's tensor, as `describe` has packed them."""
    fields = DESCRIPTION.unpack(description)
    return fields[0].rstrip(b"\0").decode(), fields[6]


def set_log(backend: ax.Backend, log: Any) -> None:
    """Let a backend write to a log, of GPUs their CPUs' backend, too."""
    backend.notes = backend.control.notes = log


@contextlib.contextmanager
def logged(world: ax.World, log: Any = None) -> Iterator[Any]:
    """Log the operations that this rank runs, on mock and on real ranks."""
    backend = world.default_group.backend
    notes, log = backend.notes, Log() if log is None else log
    set_log(backend, log)
    try:
        yield log
    finally:
        set_log(backend, notes)
