"""A save on a thread beside training: its `Work`, and its error, raised once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import CollectiveTimeoutError
from ..launch.exit import before_finalize
from ..types import Seconds, Work
from ..utils.arguments import seconds

_failed: set[Background] = set()  # whose errors have not been raised


class Background(Work):
    """A call that runs on a thread of its own. The process does not end before it is complete.

    Args:
        call: The function.
        name: Of the thread.
    """

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._call: Callable[[], Any] | None = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self, *, beside: bool = True) -> None:
        """Begin; local.

        Args:
            beside: Run on the thread; if False, run on the caller's thread to the end.
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
        """Return True if it is complete or has failed."""
        return not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait, and raise nothing; local.

        Args:
            timeout: Seconds; None waits as long as it takes.
        """
        if self._thread.ident is not None:  # else it has run on the caller's thread
            self._thread.join(timeout)

    def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until it is complete.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            CollectiveTimeoutError: It is not complete in time.
            Exception: The error of the call.
        """
        limit = seconds("timeout", timeout, positive=False)
        self.join(limit)
        if self._thread.is_alive():
            raise CollectiveTimeoutError(f"{self._thread.name} is not complete after {limit:g} s")
        if self._error is not None:
            self._set_raised()
            raise self._error

    def claim(self) -> None:
        """Let only `wait` raise an error; local."""
        self._raised = True

    def settle(self) -> None:
        """Wait, and raise an error that has not been raised; local."""
        self.join()
        if not self._raised:
            self.wait()

    def unraised(self) -> str:
        """Wait, and return the text of an error that has not been raised, else an empty text; local."""
        self.join()
        text = "" if self._raised or self._error is None else str(self._error)
        self._set_raised()
        return text

    def _set_raised(self) -> None:
        self._raised = True
        _failed.discard(self)

    def check(self) -> None:
        """Raise an error that has not been raised, if there is one by now; local."""
        if self.done() and not self._raised:
            self.wait()

    def result(self) -> Any:
        """Wait, then return the result of the call."""
        self.wait()
        return self._value


def _raise_at_the_end() -> None:
    """Raise an error that has not been raised, as the program ends."""
    if _failed:
        _failed.pop().wait()


before_finalize(_raise_at_the_end)
