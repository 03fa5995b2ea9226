"""The observer of a backend: told about each operation, on the thread that runs it, whether it succeeds or not."""

from __future__ import annotations

import threading

import pytest
import torch

import axonmpi as ax

pytestmark = pytest.mark.ranks(2)


class Recorder:
    """Keeps what it is told, with the thread."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.threads: list[int] = []

    def enter(self, operation: str, nbytes: int) -> None:
        self.events.append(("enter", operation, nbytes))
        self.threads.append(threading.get_ident())

    def leave(self, operation: str) -> None:
        self.events.append(("leave", operation))
        self.threads.append(threading.get_ident())

    def take(self) -> list[tuple[object, ...]]:
        events, self.events, self.threads = self.events, [], []
        return events


def observed(world: ax.World) -> tuple[ax.ProcessGroup, Recorder]:
    """Make a group of all ranks that a recorder observes."""
    group = world.new_group(range(world.size))
    group.backend.observer = recorder = Recorder()
    return group, recorder


def around(operation: str, nbytes: int) -> list[tuple[object, ...]]:
    return [("enter", operation, nbytes), ("leave", operation)]


@pytest.mark.ranks(1, 2, 4)
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
        assert set(recorder.threads) == {threading.get_ident()}
        events = recorder.take()
        assert events == around(name, events[0][2] if nbytes is None else nbytes)


@pytest.mark.ranks(2, 4)
@pytest.mark.not_over_double("no other thread runs asynchronous operations")
def test_asynchronous_operations_and_waiting(world) -> None:
    """The operation is observed on the thread that runs it, waiting on the thread that waits, while it lasts."""
    group, recorder = observed(world)

    def events(*, here: bool) -> list[tuple[object, ...]]:
        by_thread = zip(recorder.events, recorder.threads, strict=True)
        return [event for event, thread in by_thread if (thread == threading.get_ident()) is here]

    if world.rank == 0:
        work = group.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(ax.CollectiveTimeoutError):
            work.wait(0.01)
        assert events(here=True) == around("wait", 0)
    world.default_group.barrier()
    if world.rank:
        work = group.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    assert events(here=False) == around("all_reduce", 16)
    recorder.take()
    work.wait()  # complete already: there is nothing to wait for
    assert recorder.take() == []


@pytest.mark.not_over_double("comparing the calls, which fails, is observed")
def test_an_operation_that_fails_is_left(world) -> None:
    group, recorder = observed(world)
    with pytest.raises(ax.CollectiveMismatchError):
        group.all_reduce(torch.ones(3 + group.rank))
    assert recorder.take() == around("all_reduce", 4 * (3 + group.rank))


def test_neither_wrong_arguments_nor_what_comes_without_observer(world) -> None:
    group, recorder = observed(world)
    with pytest.raises(ValueError, match="src: expected a rank of the group"):
        group.broadcast(torch.ones(2), group.size)
    group.barrier()
    group.backend.observer = None
    group.barrier()
    assert recorder.take() == around("barrier", 0)
