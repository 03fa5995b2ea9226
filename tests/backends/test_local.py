"""A group of one rank: every operation gives back what was put in, and messages go from the rank to itself."""

import pytest
import torch
from helpers.collective_checks import CollectiveChecks, complete
from helpers.compare import refused
from helpers.numpy_reference import reductions

import axonmpi as ax
from axonmpi.backends import LocalBackend

X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize("async_op", [False, True])
def test_every_collective_gives_back_what_was_put_in(async_op) -> None:
    backend = LocalBackend()
    checks = CollectiveChecks(ax.ProcessGroup(backend), asynchronous=async_op)
    for operation in ("gather", "scatter"):
        checks.run(operation, X.dtype, (2, 3), root=0)
    checks.all_to_all([(X.dtype, (2, 3))])
    for op in reductions(X.dtype):
        checks.every_symmetric_operation(X.dtype, (2, 3), op)
    checks.barrier()
    checks.finish()
    for into in (backend.all_gather_into, backend.reduce_scatter_into):
        memory = backend.node_empty((6,), torch.float32)
        given = X.view(-1) if into == backend.all_gather_into else [X[0], X[1]]
        complete(into(memory, given, [6], async_op=async_op))
        assert torch.equal(memory, X.view(-1))
    assert backend.symmetric_empty((2, 3), torch.int8).shape == (2, 3)
    counters = backend.node_counters(1)
    counters.post(0, 3)
    counters.wait(0, 3, "a test")
    backend.close()
    refused(ax.CommunicatorError, (backend.barrier, "closed"))


def test_messages_to_itself_arrive_in_order_of_their_tag() -> None:
    backend = LocalBackend()
    first, second, other = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    early = backend.irecv(first, 0)
    assert not early.done()
    refused(ax.CollectiveMismatchError, (lambda: backend.recv(other, 0, tag=7), "waits for this very rank"))
    backend.isend(X[1], 0, tag=7).wait()
    backend.recv(other, 0, tag=7)  # nothing is left of the receive that could not be
    assert torch.equal(other, X[1])
    backend.isend(X[0], 0).wait()
    backend.isend(X[1], 0).wait()
    backend.recv(second, 0)
    early.wait()
    assert torch.equal(torch.stack([first, second]), X)
    backend.isend(X, 0, tag=1).wait()
    refused(ax.CollectiveMismatchError, (lambda: backend.recv(other, 0, tag=1), "expected 12 bytes"))


def test_a_message_from_any_rank_is_from_this_one() -> None:
    backend, received = LocalBackend(), torch.zeros(1)
    work = backend.irecv(received, None)
    backend.isend(torch.ones(1), 0)
    assert (work.result(), received.item()) == (0, 1)


def test_every_part_of_a_group_of_one_is_such_a_group() -> None:
    backend = LocalBackend(timeout=5)
    for made in (backend.split([0]), backend.partition([[0]])):
        assert (type(made), made.rank, made.size, made.timeout) == (LocalBackend, 0, 1, 5)


def test_its_memory_is_on_one_device_and_what_it_sends_for_the_library_on_the_cpu() -> None:
    backend = LocalBackend(memory=torch.device("meta"))
    for own in (backend, backend.partition([[0]]), LocalBackend().on(torch.device("meta"))):
        assert own.place.type == own.node_empty([3], torch.float32).device.type == "meta"
    assert backend.control.place.type == "cpu"
    assert ax.ProcessGroup(backend).all_gather_object([X.to("meta").shape]) == [[X.shape]]
