"""A cache of bounded size."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dictionary that forgets all its entries when the next one would make it too large.

    Programs repeat a few calls for ever or never: forgetting the oldest entry alone would cost a list of uses.

    Args:
        limit: The largest sum of the entries' costs.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._cost = 0

    def add(self, key: Key, value: Value, cost: int = 1) -> Value:
        """Keep a new entry, unless it alone costs more than the limit; return the value."""
        if self._cost + cost > self._limit:
            self.clear()
        if cost <= self._limit:
            self._cost += cost
            self[key] = value
        return value

    def clear(self) -> None:
        """Forget all entries."""
        super().clear()
        self._cost = 0
