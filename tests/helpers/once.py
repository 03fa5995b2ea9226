"""Work that mock ranks, threads of one process, do one at a time, or once for all of them."""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made")

one_thread = threading.RLock()


def once(function: Callable[..., Made]) -> Callable[..., Made]:
    """Call a function once for all ranks of this process that call it with the same arguments."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Made:
        with one_thread:
            return cached(*arguments)

    return call
