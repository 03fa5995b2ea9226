"""What travels with an rounds, on any number of peers, beside numpy."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from axonmpi.backends.call import Call
from axonmpi.backends.connection.rounds import Copied, Gathered, Rounds, Summed
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
            message = np.frombuffer(self._queues[peer, self._rank].get(timeout=600), np.uint8)
            spec[0][: len(message)] = message

        return receive

    def wait(self, *requests: Callable[[], None]) -> None:
        for request in requests:
            request()


def on_peers(count: int, task: Callable[[Rounds], Any]) -> list[Any]:
    """Run a task on each of so many peers, as threads; returns their results."""
    queues = {(a, b): queue.Queue() for a in range(count) for b in range(count)}

    def run(rank: int) -> Any:
        wires: Any = Wires(rank, queues)
        return task(Rounds(wires, wires, np.arange(count), rank, wires))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@pytest.mark.parametrize("count", range(2, 10))
def test_sums_blocks_and_copies(count) -> None:
    """And peers that say something else are told, and nothing is complete."""
    generator = np.random.default_rng(0)
    parts, blocks = generator.random((count, 5)), generator.integers(0, 256, (count, 3), np.uint8)
    call = Call("all_reduce", torch.float64, (5,), ReduceOp.SUM)

    def task(rounds: Rounds) -> tuple[list[float], list[list[int]], list[list[int]], tuple[int, ...]]:
        summed, gathered = Summed(rounds, call), Gathered(rounds, 3)
        summed.total.copy_(torch.from_numpy(parts[rounds.index]))
        assert rounds.run(HEAD, summed) == HEAD
        total = summed.total.tolist()
        gathered.rows[rounds.index] = blocks[rounds.index]
        rounds.run(HEAD, gathered)
        rows, copies = gathered.rows.tolist(), []
        for source in range(count):
            here = rounds.outgoing[:3]
            here[...] = blocks[rounds.index] if rounds.index == source else 0
            rounds.run(HEAD, Copied(rounds, 3, source))
            copies.append(here.tolist())
        key = 9 if rounds.index == count - 1 else 7
        return total, rows, copies, rounds.run((key, -key, 0, 0, 0))

    totals, *others = zip(*on_peers(count, task), strict=True)
    np.testing.assert_allclose(totals[0], parts.sum(0))
    assert set(map(tuple, totals)) == {tuple(totals[0])}
    assert others == [(blocks.tolist(),) * count, (blocks.tolist(),) * count, ((9, -7, 0, 0, 0),) * count]
