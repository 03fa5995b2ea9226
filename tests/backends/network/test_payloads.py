"""What travels with an agreement, on any number of peers, beside numpy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from axonmpi.backends.call import Call
from axonmpi.backends.network.agreement import Agreement
from axonmpi.backends.network.payloads import Copied, Gathered, Summed
from axonmpi.types import ReduceOp

HEAD = (7, -7, 1, -1, 0)


class Wires:
    """Messages between threads, in the words of MPI; stands for the module, the communicator and the waiting."""

    BYTE = None

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self._rank, self._queues = rank, queues

    def Isend(self, spec: list[Any], peer: int, tag: int) -> Callable[[], None]:
        self._queues[self._rank, peer].put(spec[0][: spec[1]].tobytes())
        return lambda: None

    def Irecv(self, spec: list[Any], peer: int, tag: int) -> Callable[[], None]:
        def receive() -> None:
            message = np.frombuffer(self._queues[peer, self._rank].get(timeout=20), np.uint8)
            spec[0][: len(message)] = message

        return receive

    def wait(self, *requests: Callable[[], None]) -> None:
        for request in requests:
            request()


def on_peers(count: int, task: Callable[[Agreement], Any]) -> list[Any]:
    """Run a task on each of so many peers, as threads; returns their results."""
    queues = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        wires: Any = Wires(rank, queues)
        results[rank] = task(Agreement(wires, wires, np.arange(count), rank, wires))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def values(count: int, numel: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, (count, numel))


@pytest.mark.parametrize("count", range(2, 10))
def test_sums(count) -> None:
    parts = values(count, 5)
    call = Call("all_reduce", torch.float64, (5,), ReduceOp.SUM)

    def task(agreement: Agreement) -> list[float]:
        summed = Summed(agreement, call)
        summed.total.copy_(torch.from_numpy(parts[agreement.index] / 7))
        assert agreement.run(HEAD, summed) == HEAD
        return summed.total.tolist()

    results = on_peers(count, task)
    np.testing.assert_allclose(results[0], parts.sum(0) / 7)
    assert all(each == results[0] for each in results)


@pytest.mark.parametrize("count", range(2, 10))
def test_blocks_of_all_and_copies_of_one(count) -> None:
    blocks = values(count, 3).astype(np.uint8)

    def task(agreement: Agreement) -> tuple[list[list[int]], list[list[int]]]:
        gathered = Gathered(agreement, 3)
        gathered.rows[agreement.index] = blocks[agreement.index]
        agreement.run(HEAD, gathered)
        copies = []
        for source in range(count):
            here = agreement.outgoing[:3]
            here[...] = blocks[agreement.index] if agreement.index == source else 0
            agreement.run(HEAD, Copied(agreement, 3, source))
            copies.append(here.tolist())
        return gathered.rows.tolist(), copies

    for gathered, copies in on_peers(count, task):
        assert gathered == copies == blocks.tolist()


@pytest.mark.parametrize("count", range(2, 10))
def test_peers_that_say_something_else_are_told_and_nothing_is_complete(count) -> None:
    def task(agreement: Agreement) -> tuple[int, ...]:
        key = 9 if agreement.index == count - 1 else 7
        return agreement.run((key, -key, 0, 0, 0))

    assert on_peers(count, task) == [(9, -7, 0, 0, 0)] * count
