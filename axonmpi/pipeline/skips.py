"""Skip connections: a tensor that one stage leaves for a later one, past the stages between.

    class Down(nn.Module):                          class Up(nn.Module):
        def forward(self, x):                           def forward(self, x):
            stash("edges", x)                               return self.conv(x) + pop("edges")
            return self.conv(x)

    Pipeline(stages, skips={"edges": (0, 3)})       from stage 0 straight to stage 3

Without a pipeline, in one process, `pop` returns the stashed value itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class _Stash(threading.local):
    """The values that this thread has stashed and not popped."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


_stash = _Stash()


def stash(name: str, value: Any) -> None:
    """Leave a tensor, or tensors in tuples, lists or dicts, for a later stage; local.

    Args:
        name: Of the connection, as in the pipeline's `skips`.
        value: Returned by `pop` in the later stage. Gradients flow back through it.

    Raises:
        ValueError: A value of this name has been stashed and not been popped.
    """
    if name in _stash.values:
        raise ValueError(
            f"stash({name!r}): it holds a value that no stage has popped; each name serves once in a forward"
        )
    _stash.values[name] = value


def pop(name: str) -> Any:
    """Take the value that an earlier stage has stashed; local.

    Args:
        name: Of the connection, as in the pipeline's `skips`.

    Raises:
        ValueError: No value of this name is stashed.
    """
    if name not in _stash.values:
        raise ValueError(
            f"pop({name!r}): nothing was stashed under this name for this stage (stashed: "
            f"{sorted(_stash.values) or 'nothing'}); give the pipeline "
            f"skips={{{name!r}: (stage that stashes, stage that pops)}}"
        )
    return _stash.values.pop(name)


@contextmanager
def skip_scope(arrived: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Let a stage pop the values that have arrived for it; yields the stashed values by name; local."""
    before, _stash.values = _stash.values, dict(arrived)
    try:
        yield _stash.values
    finally:
        _stash.values = before
