"""Asynchronous operations: order, results and errors through `Work`, time limits and what comes after them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax
from axonmpi import CollectiveMismatchError, CollectiveTimeoutError, ReduceOp, World

pytestmark = pytest.mark.ranks(2)
SHORT = 0.02


@pytest.mark.ranks(1, 2, 3)
def test_operations_run_in_the_order_of_their_start(group) -> None:
    """Each step reads what the one before wrote, so another order gives another result."""
    tensor = torch.full((100,), float(group.rank))
    works = []
    for number in range(10):
        works += [
            group.all_reduce(tensor, ReduceOp.SUM, async_op=True),
            group.broadcast(tensor, number % group.size, async_op=True),
            group.all_reduce(tensor, ReduceOp.MAX if number % 2 else ReduceOp.AVERAGE, async_op=True),
        ]
    works[-1].wait()
    assert all(work.done() for work in works)
    assert tensor.tolist() == [sum(range(group.size)) * group.size**9] * 100


@pytest.mark.ranks(2, 4)
def test_a_blocking_operation_comes_after_those_under_way(group) -> None:
    """The short way of repeated small all-reduces must not overtake the queue either."""
    small = torch.ones(1)
    for _ in range(3):
        tensors = [torch.full((100_000,), 1.0) for _ in range(4)]
        works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
        group.all_reduce(small.fill_(2.0))
        assert ([work.done() for work in works], small.item()) == ([True] * 4, 2 * group.size)
        assert all(tensor[0].item() == tensor[-1].item() == group.size for tensor in tensors)
        group.all_reduce(small.fill_(1.0))  # with nothing under way


def test_a_result_is_kept_and_can_be_waited_for_by_any_thread(group) -> None:
    tensor = torch.ones(5)
    works = [group.all_reduce(tensor, async_op=True), group.all_gather(torch.ones(1), async_op=True)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda work: work.wait(), works * 2))
    assert tensor.tolist() == [group.size] * 5
    for work in works:
        work.wait(0)
        assert work.result() is work.result()


def test_wait_gives_up_and_the_operation_goes_on(world: World) -> None:
    first, second = world.new_group(range(world.size)), world.new_group(range(world.size))
    tensor = torch.ones(3)
    work = first.all_reduce(tensor, async_op=True) if world.rank == 0 else None
    if work:
        words = r"all_reduce\(float32 \[3\], SUM\) was not complete after 0"
        limits = (SHORT, 0, timedelta(milliseconds=20))
        refused(CollectiveTimeoutError, *((partial(work.wait, limit), words) for limit in limits))
        assert not work.done()
    # Each group has a queue of its own: one that is held up does not hold up another.
    other = torch.ones(2)
    second.all_reduce(other, async_op=True).wait(timedelta(days=1))
    assert other.tolist() == [world.size] * 2
    work = work or first.all_reduce(tensor, async_op=True)
    work.wait(float("inf"))
    assert tensor.tolist() == [world.size] * 3


@pytest.mark.ranks(2, 4)
def test_a_time_limit_for_all_blocking_operations(world: World) -> None:
    group = world.new_group(range(world.size))
    for _ in range(2):
        group.all_reduce(tensor := torch.ones(3))  # the short way of a repeated one has to keep to the limit, too
    tensor.fill_(1.0)
    if world.rank == 0:
        group.backend.timeout = SHORT
        refused(
            CollectiveTimeoutError,
            (lambda: group.all_reduce(tensor), r"was not complete after 0\.02 s: another rank has not"),
        )
        assert tensor.tolist() == [1, 1, 1]
    world.barrier()
    group.backend.timeout = None
    if world.rank:
        group.all_reduce(tensor)
    # Rank 0's operation was left under way, and comes before its next one.
    group.barrier()
    assert tensor.tolist() == [world.size] * 3
    assert group.all_gather(tensor[:1]).tolist() == [world.size] * world.size


@pytest.mark.not_over_double("NCCL has no tags")
def test_a_time_limit_for_messages(world: World) -> None:
    group = world.new_group(range(world.size))
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    group.backend.timeout = SHORT
    received = torch.zeros(2)
    refused(CollectiveTimeoutError, (lambda: group.recv(received[:1], before, tag=3), f"recv.* rank {before}"))
    work = group.irecv(received[1:], before, tag=4)
    refused(CollectiveTimeoutError, (lambda: work.wait(timedelta(seconds=SHORT)), f"recv.* rank {before}"))
    assert not work.done()
    world.default_group.barrier()
    # The second receive stays posted; each message has its tag.
    group.backend.timeout = None
    sends = [group.isend(torch.tensor([float(tag)]), after, tag) for tag in (3, 4)]
    work.wait()
    assert (work.done(), received[1].item()) == (True, 4)
    for sent in sends:
        sent.wait()


@pytest.mark.ranks(2, 4)
@pytest.mark.not_over_double("calls that differ raise at once")
def test_errors_come_through_work_on_every_rank(group) -> None:
    """A mismatch, here in the shape, and its error again each time that somebody asks."""
    tensor = torch.ones(3 if group.rank else 4)
    before = torch.ones(2)
    works = [group.all_reduce(each, async_op=True) for each in (before, tensor, before)]
    works[2].wait()
    assert works[1].done()
    words = r"rank 0: all_reduce\(float32 \[4\], SUM\)"
    refused(CollectiveMismatchError, *((ask, words) for ask in (works[1].wait, works[1].result, works[1].wait)))
    assert (tensor.tolist(), before.tolist()) == ([1] * tensor.numel(), [group.size**2] * 2)


def test_closing_waits_for_what_is_under_way(world: World) -> None:
    group = world.new_group(range(world.size))
    tensors = [torch.ones(50_000) for _ in range(5)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    group.close()
    ends = [(work.done(), tensor[-1].item()) for work, tensor in zip(works, tensors, strict=True)]
    assert ends == [(True, world.size)] * 5
    closed = "barrier: this group cannot be used: it was closed"
    refused(ax.CommunicatorError, (lambda: group.barrier(async_op=True), closed))
