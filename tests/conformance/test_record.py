"""The observer of a backend: told about each operation, on the thread that runs it, whether it succeeds or not."""

import threading

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax

pytestmark = pytest.mark.ranks(2)


class Recorder:
    """Keeps what it is told, with the thread."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, tuple[object, ...]]] = []

    def enter(self, operation: str, nbytes: int) -> None:
        self._seen.append((threading.get_ident(), ("enter", operation, nbytes)))

    def leave(self, operation: str) -> None:
        self._seen.append((threading.get_ident(), ("leave", operation)))

    def take(self) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
        """Return the events since the last time: of the calling thread, and of others."""
        seen, self._seen = self._seen, []
        here = threading.get_ident()
        return [event for by, event in seen if by == here], [event for by, event in seen if by != here]


def observed(world: ax.World) -> tuple[ax.ProcessGroup, Recorder]:
    """Make a group of all ranks that a recorder observes."""
    group = world.new_group(range(world.size))
    group.backend.observer = recorder = Recorder()
    return group, recorder


def around(operation: str, nbytes: int) -> list[tuple[object, ...]]:
    return [("enter", operation, nbytes), ("leave", operation)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.not_over_double("sizes that receivers ask for are observed, too")
def test_blocking_operations_and_messages(world) -> None:
    group, recorder = observed(world)
    tensor = torch.ones(4)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for operation, name, nbytes in (
        (lambda: group.all_reduce(tensor), "all_reduce", 16),
        (lambda: group.all_reduce(tensor), "all_reduce", 16),
        (lambda: group.reduce(tensor, 0), "reduce", 16),
        (lambda: group.broadcast(tensor), "broadcast", 16),
        (lambda: group.reduce_scatter(tensor), "reduce_scatter", 16),
        (lambda: group.barrier(), "barrier", 0),
        (lambda: group.isend(tensor, after), "isend", 16),
        (lambda: group.recv(torch.zeros(4), before), "recv", 16),
        # Of these, ranks may give different sizes.
        (lambda: group.all_gather(tensor), "all_gather", None),
        (lambda: group.gather(tensor), "gather", None),
        (lambda: group.scatter(tensor), "scatter", None),
        (lambda: group.all_to_all([tensor] * group.size), "all_to_all", None),
    ):
        operation()
        events, elsewhere = recorder.take()
        assert (events, elsewhere) == (around(name, events[0][2] if nbytes is None else nbytes), [])


@pytest.mark.not_over_double("no other thread runs asynchronous operations")
def test_asynchronous_operations_and_waiting(world) -> None:
    """The operation is observed on the thread that runs it, waiting on the thread that waits, while it lasts."""
    group, recorder = observed(world)
    if world.rank == 0:
        work = group.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(ax.CollectiveTimeoutError):
            work.wait(0.01)
    world.default_group.barrier()
    if world.rank:
        work = group.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    here, elsewhere = recorder.take()
    assert (elsewhere, here) == (around("all_reduce", 16), around("wait", 0) * (len(here) // 2))
    assert here or world.rank
    work.wait()  # complete already: there is nothing to wait for
    assert recorder.take() == ([], [])


@pytest.mark.not_over_double("comparing the calls, which fails, is observed")
def test_an_operation_that_fails_is_left(world) -> None:
    group, recorder = observed(world)
    refused(ax.CollectiveMismatchError, (lambda: group.all_reduce(torch.ones(3 + group.rank)), "all_reduce"))
    assert recorder.take() == (around("all_reduce", 4 * (3 + group.rank)), [])


def test_neither_wrong_arguments_nor_what_comes_without_observer(world) -> None:
    group, recorder = observed(world)
    refused(ValueError, (lambda: group.broadcast(torch.ones(2), group.size), "src: expected a rank of the group"))
    group.barrier()
    group.backend.observer = None
    group.barrier()
    assert recorder.take() == (around("barrier", 0), [])
