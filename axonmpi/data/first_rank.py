"""A block of code that one rank runs before the others: a download, a cache, a compiled extension.

rank 0   enter ── block ── exit ┐
rank 1   enter ·················┤ block ── exit        all ranks meet once, and learn of a failure
rank 2   enter ·················┘ block ── exit
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..backends import Backend, gather_if_different
from ..errors import RankFailedError
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..utils.arguments import check_flags
from ..utils.text import text_of_problems
from ..utils.waiting import asleep


class _Thread(threading.local):
    block: tuple[Backend, bool] | None = None  # the block that this thread is in: its ranks, and `local`


_thread = _Thread()
_WORK = "the block of main_process_first"


@contextmanager
def main_process_first(group: ProcessGroup | None = None, *, local: bool = False) -> Iterator[None]:
    """Run a `with` block on one rank first, and on the other ranks after it; collective.

    Rank 0 runs the block while the others wait, mostly asleep. They begin when it has left the block, by its end or
    by `return`, `break` or `continue`. The block must not call collectives of the group. An inner block with the
    same group and `local` runs at once, as a part of the outer one.

    The wait has the limits of every collective: the group's `timeout`, and `AXONMPI_TIMEOUT`, an hour by default,
    after which the job ends. After ten minutes the watchdog prints the stack of the rank that the others wait for.
    Set `AXONMPI_TIMEOUT` to more seconds for a longer download, or to 0 for no limit.

    Args:
        group: The ranks; None means all.
        local: The first rank of each node runs the block first, for files on a disk of the node. The other ranks
            wait for those of all nodes.

    Raises:
        RankFailedError: On the ranks that wait: the block raised an error on the first rank, which raises its own.
            Names the rank and the error; the block is not run. `KeyboardInterrupt` and `SystemExit` end the job.
        ValueError: This rank is not in the group, or this is within such a block with other arguments.
        TypeError: `group` is no group, or `local` is no bool.
        CollectiveTimeoutError: The group has a `timeout`, and the first rank took longer.
    """
    check_flags(local=local)
    backend = group_of_this_rank(group, "group").backend.control
    outer = _thread.block
    if outer == (backend, local):
        yield
        return
    if outer is not None:
        raise ValueError(
            "main_process_first: expected an inner block with the outer block's group and local, whose other ranks "
            "wait meanwhile, got others; put the blocks one after the other"
        )
    _thread.block = backend, local
    try:
        if backend.rank != (backend.node_ranks[0] if local else 0):
            raise_failures(_WORK, _failures(backend))
            yield
            return
        try:
            yield
        except Exception as error:
            _failures(backend, text_of_error(error))
            raise
        raise_failures(_WORK, _failures(backend))
    finally:
        _thread.block = None


def _failures(backend: Backend, own: str = "") -> list[str]:
    """Wait for the first ranks to have run their block, and return each rank's failure; collective."""
    with asleep():
        return gather_if_different(backend, own)


def text_of_error(error: Exception) -> str:
    """Return an error as the other ranks name it; local."""
    return f"{type(error).__name__}: {error}"


def raise_failures(work: str, failures: Sequence[str]) -> None:
    """Raise if a rank has failed; local.

    Args:
        work: The work that failed, for the message.
        failures: Failure of each rank, empty for none; or a single empty one.

    Raises:
        RankFailedError: Names the ranks and their failures.
    """
    if text := text_of_problems(failures):
        raise RankFailedError(f"{work} failed on {text}")
