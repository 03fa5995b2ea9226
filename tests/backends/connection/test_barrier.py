"""The barrier in shared memory: nobody passes it alone, nobody waits for ever, and waiting costs little."""

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers.compare import refused
from helpers.placements import REAL

from axonmpi import CollectiveTimeoutError, CommunicatorError, MpiBackend, ProcessGroup, RankFailedError
from axonmpi.backends.connection import barrier as barrier_module
from axonmpi.backends.connection.barrier import Fence, NodeBarrier
from axonmpi.backends.connection.segment import PAGE, Segment
from axonmpi.testing import run_ranks
from axonmpi.utils import waiting

ROUNDS = 150


class Node:
    """Ranks whose barriers this process calls one after the other, with a clock that only their naps move.

    Attributes:
        naps: Seconds of each nap.
        at_first_nap: What other ranks do when a rank waits and naps for the first time.
    """

    def __init__(self, names: list[int], processes: list[int] | None = None, timeout: float | None = None) -> None:
        memory, count = mmap.mmap(-1, len(names) * PAGE), len(names)
        processes = processes or [os.getpid()] * count
        self.barriers = [
            NodeBarrier(Segment(memory, PAGE, own, count), None, processes, names, timeout, list)
            for own in range(count)
        ]
        self.naps: list[float] = []
        self.at_first_nap: Callable[[], object] = list
        self._words = memoryview(memory).cast("q")

    def come(self, own: int, count: int = 1) -> None:
        """Let a rank reach a barrier without waiting there."""
        self._words[own * PAGE // 8] = count

    def nap(self, seconds: float) -> None:
        if not self.naps:
            self.at_first_nap()
        self.naps.append(seconds)


@pytest.fixture
def node(monkeypatch) -> Callable[..., Node]:
    def make(*arguments, **options) -> Node:
        made = Node(*arguments, **options)
        clock = SimpleNamespace(monotonic=lambda: sum(made.naps), sleep=made.nap)
        monkeypatch.setattr(barrier_module, "time", clock)
        monkeypatch.setattr(waiting, "time", clock)
        return made

    return make


@pytest.mark.parametrize("size", [2, 4])
def test_what_was_written_before_is_seen_after(size) -> None:
    """Each barrier has the processor put memory in order on both sides."""
    memory, seen = mmap.mmap(-1, size * PAGE), []

    def body(world) -> None:
        segment = Segment(memory, PAGE, world.rank, size)
        barrier = NodeBarrier(
            segment, lambda: seen.append(world.rank), [os.getpid()] * size, list(range(size)), None, list
        )
        marks = [region[PAGE // 2 :] for region in segment.regions]
        for number in range(ROUNDS):
            marks[world.rank][:] = number % 251
            barrier.wait()
            assert [(int(mark[0]), int(mark[-1])) for mark in marks] == [(number % 251, number % 251)] * size
            barrier.wait()  # before anybody writes again
        assert barrier.count == 2 * ROUNDS

    run_ranks(size, body)
    assert [seen.count(rank) for rank in range(size)] == [4 * ROUNDS] * size


@REAL
@pytest.mark.ranks(2)
def test_a_fence_of_processes(world) -> None:
    from mpi4py import MPI

    fence = Fence(MPI, world.default_group.backend.mpi_comm)
    fence.sync()
    fence.free()


def test_waiting_costs_little(node) -> None:
    """A rank that waits looks less and less often, in the end each millisecond."""
    made = node([0, 1], timeout=0.5)
    with pytest.raises(CollectiveTimeoutError):
        made.barriers[0].wait()
    assert len(made.naps) < 600
    assert made.naps[0] < made.naps[40] < made.naps[-1] == 0.001


def test_late_ranks_are_named_by_their_numbers_in_the_group(node) -> None:
    """The rank that has given up refuses what comes next, and so do those that come late."""
    made = node([9, 2, 8, 5], timeout=0.3)
    late, own = made.barriers[:2]
    made.come(3)
    lost = r"^the loss was not complete after 0\.3 s: ranks 8, 9 did not come"
    refused(CollectiveTimeoutError, (lambda: own.wait("the loss"), lost))
    assert sum(made.naps) >= 0.3
    made.come(2)
    gave_up = "^rank 2 gave up waiting while a sum waited for it on this node"
    refused(RankFailedError, (lambda: late.wait("a sum"), gave_up))
    unusable = "^the next: this group cannot be used: "
    refused(
        CommunicatorError,
        (lambda: own.wait("the next"), f"{unusable}the loss was given up after 0.3 s"),
        (lambda: late.wait("the next"), f"{unusable}rank 2 gave up waiting"),
    )
    assert own.count == late.count == 0


@pytest.mark.parametrize("failed", [1, 2])
def test_a_rank_that_says_it_has_failed_releases_the_others(node, failed) -> None:
    """Also rank 1, which had come already and fails while rank 2 is awaited."""
    made = node([0, 1, 2])

    def fail() -> None:
        made.barriers[failed].mark_failed("out of data")
        made.come(3 - failed)

    made.come(1)
    made.at_first_nap = fail
    refused(
        RankFailedError,
        (lambda: made.barriers[0].wait("a step"), f"^rank {failed} has failed while a step waited for it"),
    )
    refused(
        CommunicatorError,
        (lambda: made.barriers[failed].wait("a step"), "a step: this group cannot be used: out of data"),
    )


# ---- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def companion():
    """Start a process that ends when it is told to; return it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield process
    process.stdin.close()
    process.wait()


def end(process: subprocess.Popen, *, reaped: bool) -> None:
    """End the process; until it is reaped, the system still knows its number."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        process.wait()


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "not reaped yet"])
def test_a_process_that_has_ended_is_noticed(node, companion, reaped) -> None:
    """But not missed at a barrier to which it had come before."""
    made = node([4, 7], [os.getpid(), companion.pid])
    made.come(1)
    end(companion, reaped=reaped)
    own = made.barriers[0]
    own.wait()
    ended = rf"rank 7 has ended \(process {companion.pid}\) while all_reduce waited for it on this node$"
    refused(RankFailedError, (lambda: own.wait("all_reduce"), f"^{ended}"))
    refused(CommunicatorError, (own.wait, "a barrier: this group cannot be used: rank 7 has ended"))


@pytest.mark.parametrize("seen", [True, False], ids=["lives", "cannot be seen"])
def test_others_are_waited_for(node, companion, seen) -> None:
    """Longer than it takes to look after them. In another container, a number means nothing here."""
    if not seen:
        end(companion, reaped=True)
    made = node([0, 1], [os.getpid(), companion.pid], timeout=0.8)
    refused(CollectiveTimeoutError, (made.barriers[0].wait, r"not complete after 0\.8 s: rank 1 did not come"))


# ---- groups ---------------------------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["small", "symmetric"])
def test_a_group_with_a_time_out(world, kind) -> None:
    """The error names the late rank or one that gave up before, and the group refuses everything from then on."""
    group = ProcessGroup(MpiBackend(world.default_group.backend.mpi_comm, timeout=600.0))
    tensor = torch.ones(3) if kind == "small" else group.symmetric_empty((200_000,), torch.float32)
    group.all_reduce(tensor)
    group.backend.set_timeout(0.5)
    last = world.size - 1
    if world.rank == last:  # comes when the others have given up
        world.barrier()
    with pytest.raises((CollectiveTimeoutError, RankFailedError)) as caught:
        group.all_reduce(tensor)
    if world.rank != last:
        world.barrier()
    calls = (lambda: group.all_reduce(tensor), group.barrier, lambda: group.all_gather(torch.ones(2)))
    refused(CommunicatorError, *((call, "this group cannot be used") for call in calls))
    messages = world.default_group.all_gather_object(str(caught.value))
    group.close()
    gave_up, did_not_come = (
        r"rank \d gave up waiting",
        rf"not complete after 0\.5 s: ranks? .*\b{last} did not come",
    )
    assert all(re.search(f"{gave_up}|{did_not_come}", message) for message in messages), messages
    assert any(re.search(did_not_come, message) for message in messages[:last]), messages
    assert re.search(gave_up, messages[last]), messages
