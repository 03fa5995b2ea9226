"""The record of a group's operations: each is entered and left, on the thread that runs it, also if it fails."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from helpers.compare import refused
from helpers.operation_log import Log, set_log

import axonmpi as ax

pytestmark = pytest.mark.ranks(2)


class Recorder(Log):
    """Keeps the events of the record, with the thread."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[int, tuple[object, ...]]] = []

    def _keep(self, *event: object) -> None:
        self._seen.append((threading.get_ident(), event))

    def enter(self, description: bytes, number: int | None = None) -> int:
        at = super().enter(description, number)
        self._keep("enter", *self.calls[at])
        return at

    def start(self, at: int) -> None:
        self._keep("start", self.calls[at][0])

    def leave(self, at: int) -> None:
        self._keep("leave", self.calls[at][0])

    def fail(self, at: int) -> None:
        self._keep("fail", self.calls[at][0])

    @contextlib.contextmanager
    def noted(self, description: bytes, number: int = 0) -> Iterator[None]:
        at = self.enter(description)
        yield
        self.leave(at)

    def take(self) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
        """Return the events since the last time: of the calling thread, and of others."""
        seen, self._seen = self._seen, []
        here = threading.get_ident()
        return [event for by, event in seen if by == here], [event for by, event in seen if by != here]


def recorded(world: ax.World) -> tuple[ax.ProcessGroup, Recorder]:
    """Make a group of all ranks whose operations a recorder keeps."""
    group = world.new_group(range(world.size))
    recorder = Recorder()
    set_log(group.backend, recorder)
    return group, recorder


def around(operation: str, nbytes: int) -> list[tuple[object, ...]]:
    return [("enter", operation, nbytes), ("leave", operation)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.not_over_double("sizes that receivers ask for are recorded, too")
def test_blocking_operations_and_messages(world) -> None:
    group, recorder = recorded(world)
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
    """An operation is entered by the caller, and started and left by the thread that runs it; so is a wait."""
    group, recorder = recorded(world)
    if world.rank == 0:
        work = group.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(ax.CollectiveTimeoutError):
            work.wait(0.01)
    world.default_group.barrier()
    if world.rank:
        work = group.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    here, elsewhere = recorder.take()
    assert elsewhere == [("start", "all_reduce"), ("leave", "all_reduce")]
    assert here == [("enter", "all_reduce", 16), *around("wait", 0) * (len(here) // 2)]
    work.wait()  # complete already: there is nothing to wait for
    assert recorder.take() == ([], [])


@pytest.mark.not_over_double("comparing the calls, which fails, is recorded")
def test_an_operation_that_fails_is_recorded_as_failed(world) -> None:
    group, recorder = recorded(world)
    refused(ax.CollectiveMismatchError, (lambda: group.all_reduce(torch.ones(3 + group.rank)), "all_reduce"))
    assert recorder.take() == ([("enter", "all_reduce", 4 * (3 + group.rank)), ("fail", "all_reduce")], [])


def test_wrong_arguments_are_not_recorded(world) -> None:
    group, recorder = recorded(world)
    refused(ValueError, (lambda: group.broadcast(torch.ones(2), group.size), "src: expected a rank of the group"))
    group.barrier()
    assert recorder.take() == (around("barrier", 0), [])
