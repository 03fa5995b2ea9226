"""Observers of the operations that a rank runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import axonmpi as ax


class Log:
    """An observer that keeps the name and size of each operation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def enter(self, operation: str, nbytes: int) -> None:
        if operation != "wait":
            self.calls.append((operation, nbytes))

    def leave(self, operation: str) -> None:
        pass


@contextlib.contextmanager
def logged(world: ax.World, observer: Any = None) -> Iterator[Any]:
    """Record the operations that this rank runs, or tell an observer of them, on mock and on real ranks."""
    backend = world.default_group.backend
    backend.observer = Log() if observer is None else observer
    try:
        yield backend.observer
    finally:
        backend.observer = None
