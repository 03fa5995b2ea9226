"""Waiting for MPI: it polls, which takes a core from whoever computes, or from the very rank that is waited for."""

from __future__ import annotations

from typing import Any

from ...utils.waiting import YIELDS, Backoff, is_beside_computation
from ..tuning import HANDSHAKE_YIELDS

__all__ = ["Patience"]


class Patience:
    """How a rank waits for MPI's requests: asleep most of the time beside a computation, yielding among many ranks.

    Args:
        mpi: The module `mpi4py.MPI`.
        oversubscribed: Whether ranks outnumber the cores anywhere.
    """

    def __init__(self, mpi: Any, *, oversubscribed: bool) -> None:
        self._request = mpi.Request
        self._oversubscribed = oversubscribed

    def wait(self, *requests: Any) -> None:
        """Wait until all are through."""
        beside = is_beside_computation()
        if not beside and not self._oversubscribed:
            self._request.Waitall(requests)
            return
        if self._request.Testall(requests):
            return
        backoff = Backoff(YIELDS if beside else HANDSHAKE_YIELDS)
        while not self._request.Testall(requests):
            if beside and not is_beside_computation():  # what was computed is done, and waits for this
                self.wait(*requests)
                return
            backoff.rest()
