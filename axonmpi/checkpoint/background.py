"""A thread that does one thing beside the program, and the error that the program is told once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import CollectiveTimeoutError
from ..launch.exit import before_finalize
from ..types import Seconds, Work
from ..utils.arguments import seconds

_failed: set[Background] = set()  # whose errors nobody was told


class Background(Work):
    """A call that runs on a thread of its own. The process does not end before it is complete.

    Args:
        call: What to do.
        name: Of the thread.
    """

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._call: Callable[[], Any] | None = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self, *, beside: bool = True) -> None:
        """Begin; local.

        Args:
            beside: Whether on the thread; False: on the caller's, to the end.
        """
        if beside:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        assert self._call is not None
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
            _failed.add(self)
        finally:
            self._call = None  # with the memory that it holds

    def __str__(self) -> str:
        return self._thread.name

    def done(self) -> bool:
        """Say whether it is complete or has failed."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait; local."""
        self._join(None)

    def _join(self, limit: float | None) -> None:
        if self._thread.ident is not None:  # else it has run on the caller's thread
            self._thread.join(limit)

    def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until it is complete.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            CollectiveTimeoutError: It is not complete in time.
            Exception: What it has raised.
        """
        limit = seconds("timeout", timeout, positive=False)
        self._join(limit)
        if self._thread.is_alive():
            raise CollectiveTimeoutError(f"{self._thread.name} is not complete after {limit:g} s")
        if self._error is not None:
            self._tell()
            raise self._error

    def claim(self) -> None:
        """Leave it to the caller of `wait` to hear of an error; local."""
        self._told = True

    def settle(self) -> None:
        """Wait, and raise an error that nobody was told; local."""
        self._join(None)
        if not self._told:
            self.wait()

    def untold(self) -> str:
        """Wait, and return the text of an error that nobody was told, empty if there is none; local."""
        self._join(None)
        text = "" if self._told or self._error is None else str(self._error)
        self._tell()
        return text

    def _tell(self) -> None:
        self._told = True
        _failed.discard(self)

    def check(self) -> None:
        """Raise an error that nobody was told, if there is one by now; local."""
        if self.done() and not self._told:
            self.wait()

    def result(self) -> Any:
        """Wait, then return what the call returned."""
        self.wait()
        return self._value


def _tell_at_the_end() -> None:
    """Raise an error that nobody was told, as the program ends."""
    if _failed:
        _failed.pop().wait()


before_finalize(_tell_at_the_end)
