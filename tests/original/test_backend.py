"""What `backend.rs` checks: the five reductions, and mock backends that talk to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from axonmpi import Backend, MockBackend, ReduceOp

PARTS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
IN_NUMPY = {
    ReduceOp.SUM: np.sum,
    ReduceOp.PRODUCT: np.prod,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.AVERAGE: np.mean,
}


def on_threads(size: int, body: Callable[[Backend], object]) -> list[object]:
    """Run `body` with each backend of a mock world, one thread each, as the original's tests do."""
    results: dict[int, object] = {}

    def run(backend: Backend) -> None:
        results[backend.rank] = body(backend)

    threads = [threading.Thread(target=run, args=(backend,)) for backend in MockBackend.create_world(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ReduceOp)
def test_reductions(group, op) -> None:
    tensor = torch.tensor(PARTS[group.rank])
    group.all_reduce(tensor, op)
    assert tensor.tolist() == IN_NUMPY[op](PARTS[: group.size], axis=0).tolist()


def test_each_backend_knows_its_place() -> None:
    (single,) = MockBackend.create_world(1)
    assert (single.name, single.rank, single.world_size) == ("mock", 0, 1)
    assert [(backend.rank, backend.world_size) for backend in MockBackend.create_world(4)] == [
        (rank, 4) for rank in range(4)
    ]


def test_all_reduce_of_one() -> None:
    (single,) = MockBackend.create_world(1)
    tensor = torch.tensor([1.0, 2.0])
    single.all_reduce(tensor, ReduceOp.SUM)
    assert tensor.tolist() == [1.0, 2.0]


def test_broadcast_on_threads() -> None:
    def body(backend: Backend) -> list[float]:
        tensor = torch.tensor([1.0, 2.0, 3.0]) if backend.rank == 0 else torch.zeros(3)
        backend.broadcast(tensor, 0)
        return tensor.tolist()

    assert on_threads(2, body) == [[1.0, 2.0, 3.0]] * 2


def test_all_reduce_on_threads() -> None:
    def body(backend: Backend) -> list[float]:
        tensor = torch.full((4,), backend.rank + 1.0)
        backend.all_reduce(tensor, ReduceOp.SUM)
        return tensor.tolist()

    assert on_threads(3, body) == [[6.0] * 4] * 3


def test_barrier_on_threads() -> None:
    assert on_threads(2, lambda backend: backend.barrier()) == [None, None]


def test_a_message_waits_for_its_receiver() -> None:
    """So one thread can send for one rank, then receive for the other."""
    first, second = MockBackend.create_world(2)
    first.send(torch.tensor([1.0, 2.0, 3.0]), 1, 0)
    received = torch.zeros(3)
    second.recv(received, 0, 0)
    assert received.tolist() == [1.0, 2.0, 3.0]
