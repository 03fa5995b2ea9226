"""The observer of a backend: told about each operation, on the thread that runs it, whether it succeeds or not."""

from __future__ import annotations

import threading

import pytest
import torch

import axonmpi as ax

pytestmark = pytest.mark.ranks(1, 2, 4)


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


@pytest.fixture
def observed():
    """Makes a group of all ranks that a recorder observes."""

    def make(world):
        group = world.new_group(range(world.size))
        recorder = Recorder()
        group.backend.observer = recorder
        return group, recorder

    return make


def around(operation: str, nbytes: int) -> list[tuple[object, ...]]:
    return [("enter", operation, nbytes), ("leave", operation)]


def test_blocking_operations(world, observed) -> None:
    group, recorder = observed(world)
    tensor = torch.ones(4)
    for operation, expected in (
        (lambda: group.all_reduce(tensor), around("all_reduce", 16)),
        (lambda: group.all_reduce(tensor), around("all_reduce", 16)),
        (lambda: group.reduce(tensor, 0), around("reduce", 16)),
        (lambda: group.broadcast(tensor), around("broadcast", 16)),
        (lambda: group.reduce_scatter(tensor), around("reduce_scatter", 16)),
        (lambda: group.barrier(), around("barrier", 0)),
    ):
        operation()
        assert set(recorder.threads) == {threading.get_ident()}
        assert recorder.take() == expected
    for operation, name in (
        (lambda: group.all_gather(tensor), "all_gather"),
        (lambda: group.gather(tensor), "gather"),
        (lambda: group.scatter(tensor), "scatter"),
        (lambda: group.all_to_all([tensor] * group.size), "all_to_all"),
    ):
        operation()
        events = recorder.take()
        assert [event[:2] for event in events] == [("enter", name), ("leave", name)]


def test_messages(world, observed) -> None:
    group, recorder = observed(world)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sending = group.isend(torch.ones(4), after)
    group.recv(torch.zeros(4), before)
    sending.wait()
    assert recorder.take() == [*around("isend", 16), *around("recv", 16)]


def test_asynchronous_operations_and_waiting(world, observed) -> None:
    """The operation is observed on the thread that runs it, waiting on the thread that waits."""
    group, recorder = observed(world)
    work = group.all_reduce(torch.ones(4), async_op=True)
    while not work.done():
        pass
    here = threading.get_ident()
    assert recorder.events == around("all_reduce", 16)
    assert here not in recorder.threads
    work.wait()  # complete already: there is nothing to wait for
    assert recorder.take() == around("all_reduce", 16)


@pytest.mark.ranks(2, 4)
def test_waiting_is_observed_while_it_lasts(world, observed) -> None:
    group, recorder = observed(world)
    if world.rank == 0:
        work = group.barrier(async_op=True)
        with pytest.raises(ax.CollectiveTimeoutError):
            work.wait(0.01)
        waited = [
            event for event, thread in zip(recorder.events, recorder.threads, strict=True) if event[1] == "wait"
        ]
        assert waited == around("wait", 0)
    world.default_group.barrier()
    if world.rank:
        work = group.barrier(async_op=True)
    work.wait()


@pytest.mark.ranks(2, 4)
def test_an_operation_that_fails_is_left(world, observed) -> None:
    group, recorder = observed(world)
    with pytest.raises(ax.CollectiveMismatchError):
        group.all_reduce(torch.ones(3 + group.rank))
    assert recorder.take() == around("all_reduce", 4 * (3 + group.rank))


def test_wrong_arguments_are_no_operation(world, observed) -> None:
    group, recorder = observed(world)
    with pytest.raises(ValueError, match="src: expected a rank of the group"):
        group.broadcast(torch.ones(2), group.size)
    assert recorder.take() == []


def test_without_observer_again(world, observed) -> None:
    group, recorder = observed(world)
    group.barrier()
    group.backend.observer = None
    group.barrier()
    assert recorder.take() == around("barrier", 0)
