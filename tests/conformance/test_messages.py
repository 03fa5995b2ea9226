"""Messages between two ranks: tags, order, sizes, kinds of tensors, and what is under way."""

import gc
from functools import partial
from random import Random

import pytest
import torch
from helpers.compare import refused
from helpers.placements import new_groups_of

from axonmpi import CollectiveMismatchError, ProcessGroup
from axonmpi.backends.connection.connection import ChunkSizes
from axonmpi.utils.waiting import Backoff, wait_until

pytestmark = pytest.mark.ranks(2)
LARGE = 3_000_000
"""Bytes that MPI libraries do not send before the receiver is there."""


def neighbours(group: ProcessGroup) -> tuple[int, int]:
    return (group.rank - 1) % group.size, (group.rank + 1) % group.size


def assert_messages_pass(group: ProcessGroup) -> None:
    """The group can be used as before; only the number of bytes of both sides has to agree."""
    before, after = neighbours(group)
    work = group.isend(torch.tensor([[group.rank, -1]], dtype=torch.int32), after)
    group.recv(received := torch.zeros(1, dtype=torch.int64), before)
    work.wait()
    assert received.view(torch.int32).tolist() == [before, -1]


@pytest.mark.ranks(2, 3)
def test_blocking_messages_pass_around(group) -> None:
    before, after = neighbours(group)
    token = torch.tensor([0, -1])
    if group.rank:
        group.recv(token, before)
    assert token.tolist() == [group.rank, group.rank - 1]
    group.send(token + 1, after)
    if group.rank == 0:
        group.recv(token, before)
        assert token.tolist() == [group.size, group.size - 1]


@pytest.mark.ranks(2, 3)
@pytest.mark.not_over_double("a message goes before the collectives called after it")
def test_messages_meet_neither_those_of_other_groups_nor_collectives(world) -> None:
    """The same tag between the same ranks in two groups, received in the other order, after collectives."""
    groups = [world.new_group(range(world.size)) for _ in range(2)]
    before, after = neighbours(groups[0])
    works = [group.isend(torch.arange(1000) + number, after) for number, group in enumerate(groups)]
    for group in groups:
        assert len(group.gather(torch.ones(3), 0) or [1] * group.size) == group.size
        group.all_to_all([torch.ones(400)] * group.size)
    for number in (1, 0):
        groups[number].recv(tensor := torch.full((1000,), -1), before)
        assert torch.equal(tensor, torch.arange(1000) + number)
    for work in works:
        work.wait()


@pytest.mark.ranks(2, 3)
@pytest.mark.not_over_double("NCCL does not know the sizes of messages")
def test_a_message_of_another_size_is_an_error_and_does_not_spoil_the_next(world) -> None:
    """Also where it goes in several pieces, and both sizes are multiples of the largest."""
    for piece in (7, 64, None):
        with new_groups_of(world, ChunkSizes(message=piece) if piece else None):
            group = world.new_group(range(world.size))
        before, after = neighbours(group)
        sizes = [(3, 4), (5, 4), (0, 4), (4, 0)]
        sizes += [(3 * piece, 2 * piece), (2 * piece, 3 * piece), (piece + 1, piece)] if piece else []
        for sent, expected in [*sizes, *([] if piece else [(LARGE, 4), (4, LARGE)])]:
            work = group.isend(torch.ones(sent, dtype=torch.uint8), after)
            receive = partial(group.recv, torch.zeros(expected, dtype=torch.uint8), before)
            words = rf"expected {expected} bytes .*from rank {before}, which sent {sent}"
            refused(CollectiveMismatchError, (receive, words))
            assert_messages_pass(group)
            work.wait()


@pytest.mark.not_over_double("NCCL does not know the sizes of messages")
def test_a_message_of_another_size_for_a_posted_receive(group) -> None:
    """Small ones: Open MPI 5.0.11 writes all of a large one into a posted buffer that is too small for it."""
    before, after = neighbours(group)
    for sent, expected in ((3, 4), (5, 4), (0, 4), (4, 0)):
        receiving = group.irecv(torch.zeros(expected, dtype=torch.uint8), before)
        sending = group.isend(torch.ones(sent, dtype=torch.uint8), after)
        for _ in range(2):
            refused(CollectiveMismatchError, (partial(receiving.wait, 20.0), f"expected {expected} bytes"))
            assert receiving.done()
        sending.wait()
        assert_messages_pass(group)


@pytest.mark.not_over_double("a message goes before the collectives called after it")
@pytest.mark.parametrize("last", ["barrier", "counter"])
def test_who_waits_elsewhere_goes_on_sending(group, last) -> None:
    """Start more messages than an MPI library takes at once. The receiver arrives after the last one."""
    if len(group.backend.node_ranks) < group.size:
        pytest.skip("counters are shared by the ranks of one node")
    count, received = 1000, torch.tensor(-1)
    counters = group.backend.node_counters(2)
    if group.rank == 0:
        works = [group.isend(torch.tensor(number), 1) for number in range(count)]
        counters.post(1, 1)
    else:
        counters.wait(1, 1, "the messages")
        for number in range(count):
            group.recv(received, 0)
            assert received == number
        counters.post(0, 1)
    if last == "counter" and group.rank == 0:
        counters.wait(0, 1, "the receiver")
    group.barrier()
    if group.rank == 0:
        for work in works:
            work.wait()


@pytest.mark.not_over_double("NCCL has no tags")
def test_done_becomes_true_without_waiting(group) -> None:
    before, after = neighbours(group)
    received = torch.zeros(2, 2).t()
    receiving = group.irecv(received, before, tag=2)
    assert not receiving.done()
    group.barrier()
    sending = group.isend(torch.ones(4), after, tag=2)
    wait_until(lambda: receiving.done() and sending.done(), Backoff())
    assert (received.tolist(), receiving.result(), sending.result()) == ([[1, 1], [1, 1]], None, None)


@pytest.mark.not_over_double("NCCL has no tags")
def test_the_memory_of_a_message_lives_as_long_as_it_is_needed(group) -> None:
    """Nobody keeps the Work, nor the tensor that is sent or received into."""
    before, after = neighbours(group)
    group.irecv(torch.zeros(LARGE, dtype=torch.uint8), before, tag=1)
    for number in range(4):
        group.isend(torch.full((LARGE,), number, dtype=torch.uint8), after)
    gc.collect()
    scribble = [torch.full((LARGE,), 99, dtype=torch.uint8) for _ in range(4)]
    received = torch.zeros(LARGE, dtype=torch.uint8)
    for number in range(4):
        group.recv(received, before)
        assert (received == number).all()
    group.barrier()
    work = group.isend(torch.ones(LARGE, dtype=torch.uint8), after, tag=1)
    assert_messages_pass(group)
    work.wait()
    assert all((tensor == 99).all() for tensor in scribble)


@pytest.mark.ranks(2, 3)
@pytest.mark.not_over_double("NCCL has no tags")
def test_any_plan_of_messages(group, seed) -> None:
    """Receives are made in any order of sources and tags; each channel keeps its own order. Also to oneself."""
    size, rank = group.size, group.rank
    for case in range(15):
        drawn = Random(f"{seed} {case}")
        plan = [
            (number, drawn.randint(1, 2) % size, drawn.choice([0, 1, 32767]), drawn.randint(0, 300))
            for number in range(drawn.randint(1, 12))
        ]  # number, how far to send, tag, number of elements
        works = [
            group.isend(torch.full((count,), 1000 * number + rank), (rank + distance) % size, tag)
            for number, distance, tag, count in plan
        ]
        order = {channel: drawn.random() for channel in sorted({each[1:3] for each in plan})}
        posted = drawn.random() < 0.5
        received = []
        for number, distance, tag, count in sorted(plan, key=lambda each: order[each[1:3]]):
            source = (rank - distance) % size
            tensor = torch.zeros(count, dtype=torch.int64)
            received.append((tensor, 1000 * number + source))
            if posted:
                works.append(group.irecv(tensor, source, tag))
            else:
                group.recv(tensor, source, tag)
        for work in reversed(works):
            work.wait()
        assert all(bool((tensor == expected).all()) for tensor, expected in received), (seed, case)
