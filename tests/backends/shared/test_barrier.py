"""The barrier in shared memory: nobody passes it alone, nobody waits for ever, and waiting costs little."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from helpers.placements import REAL

from axonmpi import CollectiveTimeoutError, CommunicatorError, MpiBackend, ProcessGroup, RankFailedError
from axonmpi.backends.shared.barrier import Fence, NodeBarrier
from axonmpi.backends.shared.segment import PAGE, Segment

ON_RANKS = pytest.mark.ranks(2, 4)
ROUNDS = 150


def barrier_of(group: ProcessGroup, segment: Segment, sync=None, timeout: float | None = None) -> NodeBarrier:
    """Make a barrier of threads or processes; collective."""
    processes = group.all_gather_object(os.getpid())
    return NodeBarrier(segment, sync, processes, list(range(group.size)), timeout)


def pass_many(group: ProcessGroup, segment: Segment, barrier: NodeBarrier) -> None:
    """What each rank writes before a barrier, all of them see after it."""
    begin, step = PAGE // 2, 64
    marks = [region[begin : begin + step] for region in segment.regions]
    before = barrier.count
    for number in range(ROUNDS):
        marks[segment.own][:] = number % 251
        barrier.wait()
        assert [int(mark[0]) for mark in marks] == [number % 251] * group.size
        assert [int(mark[-1]) for mark in marks] == [number % 251] * group.size
        barrier.wait()  # before anybody writes again
    assert barrier.count == before + 2 * ROUNDS


# ---- on ranks -------------------------------------------------------------------------------------------------


@ON_RANKS
@pytest.mark.parametrize("fenced", [False, True], ids=["plain", "fenced"])
def test_what_was_written_before_is_seen_after(world, pages, fenced) -> None:
    """A fence is used on both sides."""
    group = world.default_group
    segment, seen, fence = pages(group), [], None
    if fenced and group.backend.name == "mpi":
        from mpi4py import MPI

        fence = Fence(MPI, group.backend.mpi_comm)

    def sync() -> None:
        seen.append(barrier.count)
        if fence is not None:
            fence.sync()

    barrier = barrier_of(group, segment, sync if fenced else None)
    pass_many(group, segment, barrier)
    assert not fenced or seen == [number for number in range(2 * ROUNDS) for _ in range(2)]
    group.barrier()
    if fence is not None:
        fence.free()


@pytest.mark.ranks(2)
def test_waiting_costs_little(world, pages) -> None:
    """The last rank comes long after the others, which sleep most of the time, however busy the machine is."""
    group = world.default_group
    segment = pages(group)
    barrier = barrier_of(group, segment)
    barrier.wait()
    late = world.rank == 1
    if late:
        words = memoryview(segment.memory).cast("q")
        while words[0] <= barrier.count:
            time.sleep(0.001)
        time.sleep(0.5)
    began, burnt = time.monotonic(), time.thread_time()
    barrier.wait()
    burnt, waited = time.thread_time() - burnt, time.monotonic() - began
    assert late or waited > 0.4
    assert late or burnt < 0.1 * waited
    group.barrier()


@ON_RANKS
def test_a_rank_that_is_late_is_named(world, pages) -> None:
    group = world.default_group
    segment = pages(group)
    barrier = barrier_of(group, segment, timeout=0.3)
    barrier.wait()
    if world.rank == world.size - 1:  # comes when the others have given up
        group.barrier()
        with pytest.raises(RankFailedError, match=r"rank \d gave up waiting while the loss waited for it"):
            barrier.wait("the loss")
    else:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"the loss was not complete after 0\.3 s") as caught:
            barrier.wait("the loss")
        assert time.monotonic() - began >= 0.3
        assert re.search(rf"ranks? .*\b{world.size - 1} did not come", str(caught.value))
        group.barrier()
    for _ in range(2):
        with pytest.raises(CommunicatorError, match=r"the next: this group cannot be used: .*(gave|given) up"):
            barrier.wait("the next")
    group.barrier()


@ON_RANKS
def test_a_rank_that_says_it_has_failed_releases_the_others(world, pages) -> None:
    group = world.default_group
    segment = pages(group)
    barrier = barrier_of(group, segment)
    barrier.wait()
    if world.rank == 0:
        barrier.mark_failed("out of data")
        with pytest.raises(CommunicatorError, match="a step: this group cannot be used: out of data"):
            barrier.wait("a step")
    else:
        # Of several, perhaps one that has given up for the same reason before.
        failed = "0" if world.size == 2 else rf"[^{world.rank}]"
        with pytest.raises(RankFailedError, match=f"rank {failed} has failed while a step waited for it on this"):
            barrier.wait("a step")
    group.barrier()


@REAL
@ON_RANKS
@pytest.mark.parametrize("kind", ["small", "symmetric"])
def test_a_group_with_a_time_out(world, kind) -> None:
    """The error names the late rank, and the group refuses everything from then on."""
    group = ProcessGroup(MpiBackend(world.default_group.backend.mpi_comm, timeout=0.5))
    assert group.backend.path == "node"
    tensor = torch.ones(3) if kind == "small" else group.symmetric_empty((200_000,), torch.float32)

    def run() -> None:
        group.all_reduce(tensor)

    for _ in range(2):
        run()
    last = world.size - 1
    if world.rank == last:  # comes when the others have given up
        world.default_group.barrier()
    with pytest.raises((CollectiveTimeoutError, RankFailedError)) as caught:
        run()
    if world.rank != last:
        world.default_group.barrier()
    for call in (run, group.barrier, lambda: group.all_gather(torch.ones(2))):
        with pytest.raises(CommunicatorError, match="this group cannot be used"):
            call()
    world.default_group.barrier()
    group.close()
    if world.rank == last:
        words = r"rank \d gave up waiting"
    else:
        words = rf"not complete after 0\.5 s: ranks? .*\b{last} did not come"
    assert re.search(words, str(caught.value)), caught.value


# ---- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def companion():
    """Start a process that ends when it is told to; return it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield process
    process.stdin.close()
    process.wait()


def two_pages() -> Segment:
    return Segment(mmap.mmap(-1, 2 * PAGE), PAGE, 0, 2)


def end(process: subprocess.Popen, *, reaped: bool) -> None:
    """End the process; until it is reaped, the system still knows its number."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        process.wait()


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "not reaped yet"])
def test_a_process_that_has_ended_is_noticed(companion, reaped) -> None:
    barrier = NodeBarrier(two_pages(), None, [os.getpid(), companion.pid], [4, 7], None)
    end(companion, reaped=reaped)
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        barrier.wait("all_reduce(...)")
    assert time.monotonic() - began < 5
    words = f"rank 7 has ended (process {companion.pid}) while all_reduce(...) waited for it on this node"
    assert str(caught.value) == words
    with pytest.raises(CommunicatorError, match=r"barrier\(\): this group cannot be used: rank 7 has ended"):
        barrier.wait("barrier()")


def test_a_process_that_has_come_before_it_ended_is_not_missed(companion) -> None:
    segment = two_pages()
    barrier = NodeBarrier(segment, None, [os.getpid(), companion.pid], [0, 1], None)
    memoryview(segment.memory).cast("q")[PAGE // 8] = 1
    end(companion, reaped=True)
    barrier.wait()
    assert barrier.count == 1
    with pytest.raises(RankFailedError, match="rank 1 has ended"):
        barrier.wait()


@pytest.mark.parametrize("seen", [True, False], ids=["lives", "cannot be seen"])
def test_others_are_waited_for(companion, seen) -> None:
    """Longer than it takes to look after them. In another container, a number means nothing here."""
    if not seen:
        end(companion, reaped=True)
    barrier = NodeBarrier(two_pages(), None, [os.getpid(), companion.pid], [0, 1], 0.8)
    with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0\.8 s: rank 1 did not come"):
        barrier.wait()


def test_all_late_ranks_are_named_by_their_numbers_in_the_group() -> None:
    segment = Segment(mmap.mmap(-1, 4 * PAGE), PAGE, 1, 4)
    barrier = NodeBarrier(segment, None, [os.getpid()] * 4, [9, 2, 8, 5], 0.05)
    memoryview(segment.memory).cast("q")[3 * PAGE // 8] = 1  # the fourth, rank 5, is there
    with pytest.raises(
        CollectiveTimeoutError, match=r"a sum was not complete after 0\.05 s: ranks 8, 9 did not come"
    ):
        barrier.wait("a sum")
