"""Asynchronous operations: order, results and errors through `Work`, time limits and what comes after them."""

from __future__ import annotations

import threading

import pytest
import torch

import axonmpi as ax
from axonmpi import CollectiveMismatchError, CollectiveTimeoutError, ProcessGroup, ReduceOp, World

pytestmark = pytest.mark.ranks(1, 2, 4)
SHORT = 0.05
GO = 7
"""Tag of the message with which rank 0 lets the others go on."""


def hold(group: ProcessGroup) -> None:
    """Wait, on the other ranks, until rank 0 calls `release`."""
    if group.rank:
        group.recv(torch.zeros(1), 0, GO)


def release(group: ProcessGroup) -> None:
    if group.rank == 0:
        for rank in range(1, group.size):
            group.send(torch.zeros(1), rank, GO)


def test_operations_run_in_the_order_of_their_start(group) -> None:
    """Each step reads what the one before wrote, so another order gives another result."""
    tensor = torch.full((100,), float(group.rank))
    works = []
    for number in range(10):
        works.append(group.all_reduce(tensor, ReduceOp.SUM, async_op=True))
        works.append(group.broadcast(tensor, number % group.size, async_op=True))
        works.append(group.all_reduce(tensor, ReduceOp.MAX if number % 2 else ReduceOp.AVERAGE, async_op=True))
    works[-1].wait()
    assert all(work.done() for work in works)
    first = group.size * (group.size - 1) / 2
    assert tensor.tolist() == [first * group.size**9] * 100


def test_a_blocking_operation_comes_after_those_under_way(group) -> None:
    tensors = [torch.full((100_000,), 1.0) for _ in range(4)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    small = torch.ones(1)
    group.all_reduce(small)
    assert all(work.done() for work in works)
    assert small.item() == group.size
    assert all(tensor[0].item() == tensor[-1].item() == group.size for tensor in tensors)


def test_a_blocking_operation_that_ran_before_comes_after_those_under_way(group) -> None:
    """The short way of repeated small all-reduces must not overtake the queue either."""
    small = torch.ones(1)
    for _ in range(3):
        group.all_reduce(small.fill_(1.0))
    work = group.all_reduce(torch.ones(100_000), async_op=True)
    group.all_reduce(small.fill_(2.0))
    assert work.done()
    assert small.item() == 2 * group.size


def test_results_come_through_work(group) -> None:
    size, rank = group.size, group.rank
    own = torch.tensor([float(rank)])
    works = {
        "all_reduce": group.all_reduce(own.clone(), async_op=True),
        "reduce": group.reduce(own.clone(), 0, async_op=True),
        "broadcast": group.broadcast(own.clone(), async_op=True),
        "barrier": group.barrier(async_op=True),
        "all_gather": group.all_gather(own, async_op=True),
        "reduce_scatter": group.reduce_scatter(torch.arange(float(size)), async_op=True),
        "gather": group.gather(own, async_op=True),
        "scatter": group.scatter(torch.arange(size), async_op=True),
        "all_to_all": group.all_to_all([own] * size, async_op=True),
    }
    for name in ("all_reduce", "reduce", "broadcast", "barrier"):
        assert works[name].result() is None, name
    assert works["all_gather"].result().tolist() == list(range(size))
    assert works["reduce_scatter"].result().tolist() == [size * rank]
    gathered = works["gather"].result()
    assert gathered is None if rank else [part.item() for part in gathered] == list(range(size))
    assert works["scatter"].result().tolist() == [rank]
    assert [part.item() for part in works["all_to_all"].result()] == list(range(size))
    for work in works.values():
        work.wait()
        work.wait(SHORT)
        assert work.done()
        assert work.result() is work.result()


def test_work_can_be_waited_for_by_another_thread(group) -> None:
    tensor = torch.ones(5)
    work = group.all_reduce(tensor, async_op=True)
    waiting = [threading.Thread(target=work.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert tensor.tolist() == [group.size] * 5


@pytest.mark.ranks(2, 4)
def test_wait_gives_up_and_the_operation_goes_on(group) -> None:
    tensor = torch.ones(3)
    if group.rank == 0:
        work = group.all_reduce(tensor, async_op=True)
        for limit in (SHORT, 0, 0.0):
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce\(float32 \[3\], SUM\) was not complete"):
                work.wait(limit)
            assert not work.done()
    hold(group)
    release(group)
    if group.rank:
        work = group.all_reduce(tensor, async_op=True)
    work.wait(float("inf"))
    assert tensor.tolist() == [group.size] * 3


@pytest.mark.ranks(2, 4)
def test_a_time_limit_for_all_blocking_operations(world: World) -> None:
    group = world.new_group(range(world.size))
    group.backend.timeout = SHORT if world.rank == 0 else None
    tensor = torch.full((3,), 1.0)
    if world.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"was not complete after 0\.05 s: another rank has not"):
            group.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]
        group.backend.timeout = None
    hold(world.default_group)
    release(world.default_group)
    if world.rank:
        group.all_reduce(tensor)
    # Rank 0's operation was left under way, and comes before its next one.
    group.barrier()
    assert tensor.tolist() == [world.size] * 3


def test_operations_within_the_time_limit(world: World) -> None:
    group = world.new_group(range(world.size))
    group.backend.timeout = 30.0
    tensor = torch.ones(3)
    for _ in range(3):
        group.all_reduce(tensor)
    assert tensor.tolist() == [world.size**3] * 3
    assert group.all_gather(tensor[:1]).tolist() == [world.size**3] * world.size
    message = torch.zeros(3)
    work = group.isend(tensor, (group.rank + 1) % group.size)
    group.recv(message, (group.rank - 1) % group.size)
    work.wait()
    assert torch.equal(message, tensor)


@pytest.mark.ranks(2, 4)
def test_a_time_limit_for_messages(world: World) -> None:
    group = world.new_group(range(world.size))
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    group.backend.timeout = SHORT
    with pytest.raises(CollectiveTimeoutError, match=f"recv.* rank {before}"):
        group.recv(torch.zeros(1), before, tag=3)
    received = torch.zeros(1)
    work = group.irecv(received, before, tag=4)
    with pytest.raises(CollectiveTimeoutError, match=f"recv.* rank {before}"):
        work.wait(SHORT)
    assert not work.done()
    world.default_group.barrier()
    # Both receives stay posted; each gets the message of its tag.
    sends = [group.isend(torch.tensor([float(tag)]), after, tag) for tag in (3, 4)]
    work.wait()
    assert work.done()
    assert received.item() == 4
    for sent in sends:
        sent.wait()


def test_errors_come_through_work_on_every_rank(group) -> None:
    """A mismatch, here in the shape, and its error again each time that somebody asks."""
    if group.size == 1:
        return
    tensor = torch.ones(3 if group.rank else 4)
    before = torch.ones(2)
    works = [
        group.all_reduce(before, async_op=True),
        group.all_reduce(tensor, async_op=True),
        group.all_reduce(before, async_op=True),
    ]
    works[2].wait()
    assert works[1].done()
    for ask in (works[1].wait, works[1].result, works[1].wait):
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce\(float32 \[4\], SUM\)"):
            ask()
    assert tensor.tolist() == [1] * tensor.numel()
    assert before.tolist() == [group.size**2] * 2


def test_closing_waits_for_what_is_under_way(world: World) -> None:
    group = world.new_group(range(world.size))
    tensors = [torch.ones(50_000) for _ in range(5)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    group.close()
    assert all(work.done() for work in works)
    assert all(tensor[-1].item() == world.size for tensor in tensors)
    with pytest.raises(ax.CommunicatorError, match="barrier: this group cannot be used: it was closed"):
        group.barrier(async_op=True)


def test_groups_do_not_wait_for_each_other(world: World) -> None:
    """Each group has a queue of its own: one that is held up does not hold up another."""
    first, second = world.new_group(range(world.size)), world.new_group(range(world.size))
    late = torch.ones(2)
    work = first.all_reduce(late, async_op=True) if world.rank == 0 else None
    tensor = torch.ones(2)
    second.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [world.size] * 2
    if work is None:
        work = first.all_reduce(late, async_op=True)
    work.wait()
    assert late.tolist() == [world.size] * 2
