"""Skip connections: a tensor that one stage leaves for a later one, past those between.

    class Down(nn.Module):                          class Up(nn.Module):
        def forward(self, x):                           def forward(self, x):
            stash("edges", x)                               return self.conv(x) + pop("edges")
            return self.conv(x)

    Pipeline(stages, skips={"edges": (0, 3)})       from stage 0 straight to stage 3

Without a pipeline, in one process, what was stashed is simply there when it is popped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["pop", "skip_scope", "stash"]

_thread = threading.local()


def _here() -> dict[str, Any]:
    if not hasattr(_thread, "stashed"):
        _thread.stashed = {}
    stashed: dict[str, Any] = _thread.stashed
    return stashed


def stash(name: str, value: Any) -> None:
    """Leave a tensor, or tensors in tuples, lists or dicts, for a later stage; local.

    Args:
        name: What the pipeline's `skips` calls the connection.
        value: What `pop` returns there. Gradients flow back through it.

    Raises:
        ValueError: Something of this name has been left and not been taken.
    """
    stashed = _here()
    if name in stashed:
        raise ValueError(
            f"stash({name!r}): it holds a value that nobody has popped; each name serves once in a forward"
        )
    stashed[name] = value


def pop(name: str) -> Any:
    """Take what an earlier stage has left; local.

    Args:
        name: What the pipeline's `skips` calls the connection.

    Raises:
        ValueError: Nothing of this name is there.
    """
    stashed = _here()
    if name not in stashed:
        raise ValueError(
            f"pop({name!r}): nothing was stashed under this name for this stage (there is: "
            f"{sorted(stashed) or 'nothing'}); give the pipeline "
            f"skips={{{name!r}: (stage that stashes, stage that pops)}}"
        )
    return stashed.pop(name)


@contextmanager
def skip_scope(arrived: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a stage with what has arrived for it; the block's value is what is stashed when it ends; local."""
    before = _here()
    _thread.stashed = dict(arrived)
    try:
        yield _thread.stashed
    finally:
        _thread.stashed = before
