"""Turns in scratch memory: few places or many, whichever is quicker, the same on all ranks; and right results."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from collective_checks import CollectiveChecks
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import Places
from symmetric_checks import SymmetricChecks

from axonmpi import ReduceOp
from axonmpi.backends import node_choice, node_chunks, node_scratch
from axonmpi.backends.node_barrier import NodeBarrier
from axonmpi.backends.node_choice import Pace, PlaceChoice
from axonmpi.backends.node_plans import CHOICE_BYTES, medium_bytes
from axonmpi.backends.node_scratch import ALIGNMENT, CHUNK_BYTES, Ring, many_places
from axonmpi.backends.node_turns import Turns
from axonmpi.backends.reduction import DTYPES
from axonmpi.backends.shared_memory import Segment

RESTLESS = Pace(first=1, shortest=2, longest=2, trial=2, unsettled=0, least_chunk=1, gain=1e9)
"""Whatever was measured, each trial is a change."""
UNDECIDED = replace(RESTLESS, gain=1.0)
"""What was measured decides, which is chance."""
MIB = 1 << 20
NEAR, FAR = 2e-5, 2e-4


class Votes:
    """One rank's view of words that all see at once."""

    def __init__(self, shown: list[tuple[int, int]], rank: int) -> None:
        self.shown, self.rank = shown, rank

    def vote(self, usual: int, other: int) -> None:
        self.shown[self.rank] = usual, other

    def votes(self) -> list[tuple[int, int]]:
        return list(self.shown)


class Node:
    """Ranks that copy something a turn; `seconds` of a rank and a number of places, as the test sets it."""

    def __init__(self, ranks: int, pace: Pace | None = None, *, has_memory: bool = True) -> None:
        shown = [(0, 0)] * ranks
        self.asked = [0] * ranks
        self.has_memory = has_memory
        self.choices = [PlaceChoice(Votes(shown, rank), partial(self.prepare, rank), pace) for rank in range(ranks)]
        self.used: list[bool] = []
        self.count = 0

    def prepare(self, rank: int) -> bool:
        self.asked[rank] += 1
        return self.has_memory

    def turn(self, seconds, nbytes=MIB) -> None:
        many = self.choices[0].many
        assert {choice.many for choice in self.choices} == {many}
        self.used.append(many)
        for rank, choice in enumerate(self.choices):
            choice.note(self.count, nbytes, seconds(rank, many))
        assert len(set(self.asked)) == 1  # since it is collective
        self.count += 1

    def share_of_many(self, turns: int) -> float:
        return sum(self.used[-turns:]) / turns


def by_places(few: float, many: float):
    return lambda rank, is_many: many if is_many else few


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_takes_less_time_is_chosen(ranks) -> None:
    node = Node(ranks)
    for _ in range(1000):
        node.turn(by_places(few=NEAR, many=2 * NEAR))
    assert node.share_of_many(1000) < 0.05
    for _ in range(1000):  # the ranks are moved to cores that are far apart
        node.turn(by_places(few=FAR, many=2 * NEAR))
    assert node.share_of_many(500) > 0.95
    for _ in range(1000):
        node.turn(by_places(few=NEAR, many=2 * NEAR))
    assert node.share_of_many(500) < 0.05


def test_the_sum_over_the_ranks_decides() -> None:
    """Four ranks gain a little, and one loses more than all of them."""
    node = Node(5)
    for _ in range(500):
        node.turn(lambda rank, many: 9 * NEAR if many and rank == 0 else NEAR / (2 if many else 1))
    assert node.share_of_many(400) < 0.2
    for _ in range(1000):
        node.turn(lambda rank, many: 2 * NEAR if many and rank == 0 else NEAR / (2 if many else 1))
    assert node.share_of_many(400) > 0.9


def test_a_small_gain_changes_nothing() -> None:
    node = Node(2)
    for _ in range(2000):
        node.turn(by_places(few=NEAR, many=0.95 * NEAR))
    assert node.share_of_many(2000) < 0.05
    # Each trial in vain makes the next one wait longer.
    trials = [at for at, (before, now) in enumerate(pairwise(node.used)) if now and not before]
    assert trials == sorted(trials)
    assert len(trials) >= 4
    assert trials[1] - trials[0] < trials[2] - trials[1] < trials[3] - trials[2]


def test_outliers_change_nothing() -> None:
    """A copy now and then takes a hundred times as long: the system had other things to do."""
    node = Node(2)
    random = np.random.default_rng(0)
    for _ in range(2000):
        node.turn(lambda rank, many: NEAR * (2 if many else 1) * (100 if random.random() < 0.1 else 1))
    assert node.share_of_many(2000) < 0.05


def test_sizes_may_change() -> None:
    """What a byte takes is compared."""
    node = Node(2)
    for number in range(2000):
        scale = 1 + number % 7
        node.turn(lambda rank, many, scale=scale: scale * NEAR * (0.97 if many else 1), scale * MIB)
    assert node.share_of_many(2000) < 0.05


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    ranks=st.integers(1, 4),
    pace=st.builds(
        Pace,
        first=st.integers(1, 5),
        shortest=st.integers(1, 6),
        longest=st.integers(6, 20),
        trial=st.integers(1, 4),
        unsettled=st.integers(0, 2),
        least_chunk=st.just(1),
        gain=st.sampled_from([0.5, 1.0, 1e9]),
    ),
    seed=st.integers(0, 1000),
)
def test_whatever_is_measured_all_ranks_do_the_same(ranks, pace, seed) -> None:
    """`Node.turn` compares them in every turn; also where there are other barriers between two copies."""
    node, random = Node(ranks, pace), np.random.default_rng(seed)
    for _ in range(200):
        node.turn(lambda rank, many: random.random(), int(random.integers(1, 3)))
        for _ in range(random.integers(0, 2)):
            node.count += 1
    assert {True, False} == set(node.used)


def test_votes_are_read_a_barrier_later() -> None:
    """Two copies may lie between the same two barriers: the second one is no reason to look."""
    node, random = Node(2, UNDECIDED), np.random.default_rng(3)
    for number in range(100):
        many = node.choices[0].many
        assert {choice.many for choice in node.choices} == {many}
        for choice in node.choices:  # while the first acts, the second has not voted
            for _ in range(1 + number % 3):
                choice.note(node.count, MIB, random.random())
        node.used.append(many)
        node.count += 1
    assert {True, False} == set(node.used)


def test_without_memory_it_is_not_tried_again() -> None:
    node = Node(2, has_memory=False)
    for _ in range(2000):
        node.turn(by_places(few=FAR, many=NEAR))
    assert node.used == [False] * 2000
    assert node.asked == [1, 1]


def test_counting_down_is_the_same_as_noting() -> None:
    """While all is quiet."""
    slow, quick = Node(1), Node(1)
    for node in (slow, quick):
        choice = node.choices[0]
        for number in range(1000):
            if node is quick and choice.quiet:
                choice.quiet -= 1
                node.used.append(choice.many)
                node.count += 1
            else:
                node.turn(by_places(few=FAR if number > 500 else NEAR, many=2 * NEAR))
    assert slow.used == quick.used
    assert {True, False} == set(slow.used)


def test_how_many_places() -> None:
    counts = [many_places(ranks) for ranks in range(1, 200)]
    assert all(count % 2 == 0 and count >= 4 for count in counts)  # even: see Turns
    assert counts == sorted(counts, reverse=True)
    assert max(CHUNK_BYTES * count * ranks for ranks, count in enumerate(counts[:8], 1)) <= 32 * MIB


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(nbytes=st.integers(2, 5000), sizes=st.lists(st.integers(1, 2500), min_size=2, max_size=40))
def test_a_turn_leaves_what_the_one_before_wrote(nbytes, sizes) -> None:
    """Whatever each of them writes: a rank may still read what was written in the turn before."""
    ring = Ring([np.zeros(nbytes * ALIGNMENT, np.uint8) for _ in range(3)])
    spans = []
    for turn, size in enumerate(sizes):
        size = min(size * ALIGNMENT // 3 + 1, ring.half_bytes // ALIGNMENT * ALIGNMENT)
        offset = ring.offset(turn, size)
        assert 0 <= offset <= offset + size <= nbytes * ALIGNMENT
        spans.append((offset, offset + size))
    for (low, high), (start, stop) in pairwise(spans):
        assert high <= start or stop <= low


def test_a_ring_comes_round_late() -> None:
    """The same size again and again uses all of it."""
    ring = Ring([np.zeros(64 * ALIGNMENT, np.uint8)])
    offsets = [ring.offset(turn, ALIGNMENT) for turn in range(128)]
    assert sorted(offsets[:64]) == list(range(0, 64 * ALIGNMENT, ALIGNMENT))
    assert offsets[64:] == offsets[:64]


# ---- on ranks -------------------------------------------------------------------------------------------------


@pytest.fixture
def changes(monkeypatch):
    """Let real ranks change the number of places all the time; returns what they have changed to."""
    seen: list[bool] = []
    decide = PlaceChoice._decide

    def look(choice) -> None:
        decide(choice)
        seen.append(choice.many)

    monkeypatch.setattr(node_choice, "PACE", RESTLESS)
    monkeypatch.setattr(PlaceChoice, "_decide", look)
    return seen


class PageScratch:
    """Places of 32 bytes each, two and eight, in each rank's page."""

    begin, step = 2048, 32

    def __init__(self, segment: Segment) -> None:
        rows = np.frombuffer(segment.memory, np.uint8).reshape(len(segment.regions), -1)[:, self.begin :]
        self.places = [rows[:, at : at + self.step].view(np.int64) for at in range(0, 10 * self.step, self.step)]

    def place(self, turn: int, *, many: bool) -> int:
        return 2 + turn % 8 if many else turn & 1


class PageVotes:
    """Votes in each rank's page."""

    def __init__(self, segment: Segment) -> None:
        self.words = np.frombuffer(segment.memory, np.int64).reshape(len(segment.regions), -1)[:, 128:130]
        self.own = segment.own

    def vote(self, usual: int, other: int) -> None:
        self.words[self.own] = usual, other

    def votes(self) -> list[tuple[int, int]]:
        return [tuple(pair) for pair in self.words.tolist()]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_turn_reads_what_the_turn_before_wrote(world, pages, stages) -> None:
    """Whoever is quick or slow, and however many places there are: each rank finds what all others meant it to."""
    group = world.default_group
    segment = pages(group)
    barrier = NodeBarrier(segment, None, group.all_gather_object(os.getpid()), list(range(group.size)), 60)
    scratch = PageScratch(segment)
    choice = PlaceChoice(PageVotes(segment), lambda: True, UNDECIDED)
    turns = Turns(barrier, scratch, choice)
    common, own = np.random.default_rng(stages), np.random.default_rng(100 + group.rank)
    calls, seen, wrong = [], set(), []

    def stage(number: int):
        def act(chunk: int, place: int, before: int) -> None:
            for _ in range(own.integers(0, 3)):
                os.sched_yield()
            seen.add(place)
            if number:
                found = scratch.places[before][:, number - 1].tolist()
                if found != [1000 * calls[-1] + 10 * chunk + rank for rank in range(group.size)]:
                    wrong.append((calls[-1], chunk, number, before, found))
            assert place != before or barrier.count == 0
            scratch.places[place][group.rank, number] = 1000 * calls[-1] + 10 * chunk + group.rank

        return act

    acts = [stage(number) for number in range(stages)]
    for call in range(150):
        calls.append(call)
        chunks, way = int(common.integers(1, 9)), int(common.integers(0, 4))
        if way == 0:  # agreed before anything was put in
            barrier.wait()
            turns.run("a test", chunks, acts, 0, 8)
        elif way == 1:  # some have put in their first chunk, in vain
            if group.rank % 2:
                turns.put_first(acts[0])
            barrier.wait()
            turns.run("a test", chunks, acts, 0, 8)
        else:
            turns.put_first(acts[0])
            barrier.wait()
            turns.run("a test", chunks, acts, 1, 8 if way == 2 else 0)
    group.barrier()
    assert wrong == []
    assert seen == set(range(10))


class OrdinaryChecks(SymmetricChecks):
    """The same operations, on tensors of each rank's own memory."""

    _lay = CollectiveChecks._lay


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", ["ordinary", "mixed"])
def test_every_operation_while_places_change(world, changes, kind) -> None:
    group = world.new_group(range(world.size))
    is_real = group.backend.name == "mpi"
    if is_real:
        group.backend.piece_bytes = 1 << 14
    most = 200_000
    of_kind = OrdinaryChecks if kind == "ordinary" else SymmetricChecks
    checks = of_kind(group, Places(group, "mixed", most + 64))
    for number, dtype in enumerate(DTYPES):
        for nbytes in (5000, 40_000 + 128 * number, most):
            checks.every_symmetric_operation(dtype, (nbytes // dtype.itemsize,), ReduceOp.SUM)
    checks.finish()
    group.close()
    assert not is_real or {True, False} <= set(changes)


@pytest.mark.ranks(2, 4)
def test_large_chunks_while_places_change(world, changes) -> None:
    """As large as they come, many in a call, a single one in a call, several groups at once."""
    size = world.size
    groups = [world.new_group(range(size)), world.new_group(range(size)[::-1])]
    line = torch.arange(11 * MIB // 4 + 3, dtype=torch.int32)
    for repeat in range(4):
        for count in (line.numel(), MIB // 4, 3 * MIB // 4 + 1):
            for group in groups:
                tensor = line[:count] * (world.rank + 1 + repeat)
                group.all_reduce(tensor)
                assert torch.equal(tensor, line[:count] * (size * (size + 1) // 2 + repeat * size))
                root = repeat % size
                tensor = line[:count] + group.rank
                group.broadcast(tensor, root)
                assert torch.equal(tensor, line[:count] + root)
    assert groups[0].backend.name != "mpi" or {True, False} <= set(changes)
    for group in groups:
        group.close()


@pytest.mark.ranks(3, 4)
def test_the_bits_do_not_depend_on_places(world, monkeypatch) -> None:
    """The same as numpy's additions in rank order, whichever places each chunk went through."""
    values = [
        np.random.default_rng(rank).standard_normal(3 * MIB // 4, dtype=np.float32) for rank in range(world.size)
    ]
    expected = values[0].copy()
    for value in values[1:]:
        expected += value
    for pace in (Pace(), RESTLESS):
        monkeypatch.setattr(node_choice, "PACE", pace)
        group = world.new_group(range(world.size))
        for _ in range(5):
            tensor = torch.from_numpy(values[world.rank].copy())
            group.all_reduce(tensor)
            assert tensor.numpy().tobytes() == expected.tobytes()
        group.close()


@pytest.mark.ranks(2, 3, 4)
def test_direct_reductions_while_places_change(world, changes) -> None:
    """Of data that each rank adds up by itself, of several sizes, between chunks that take their turns."""
    group, size = world.new_group(range(world.size)), world.size
    most = medium_bytes(size) // 4
    line = torch.arange(3 * MIB // 4, dtype=torch.int32)
    shared = group.symmetric_empty((most,), torch.int32)
    random = np.random.default_rng(1)  # in step on all ranks
    for repeat in range(150):
        count = int(random.choice([4, CHOICE_BYTES // 4, most // 3, most // 2, most - 1, most, line.numel()]))
        tensor = line[:count] * (world.rank + 1) + repeat
        if repeat % 5 == 4 and count <= most:  # some have a symmetric tensor of that size, perhaps all
            lies_there = repeat % 2 or world.rank == 0
            tensor = shared[:count].copy_(tensor) if lies_there else tensor
        group.all_reduce(tensor)
        assert torch.equal(tensor, line[:count] * (size * (size + 1) // 2) + repeat * size)
    group.close()
    assert group.backend.name != "mpi" or {True, False} <= set(changes)


@pytest.mark.ranks(2, 4)
def test_without_memory_for_more_places_two_serve(world, real_group, changes, monkeypatch) -> None:
    group = real_group(world)
    asked = []

    def allocate(arena, nbytes) -> None:
        asked.append(nbytes)

    monkeypatch.setattr(Ring, "allocate", allocate)
    line = torch.arange(5 * MIB // 4, dtype=torch.int32)
    for repeat in range(20):
        for count in (line.numel(), CHOICE_BYTES // 4):
            tensor = line[:count] * (world.rank + repeat)
            group.all_reduce(tensor)
            assert torch.equal(tensor, line[:count] * (world.size * (world.size - 1) // 2 + repeat * world.size))
    group.close()
    assert asked == [CHUNK_BYTES * many_places(world.size)] * 2  # for either kind of reduction
    assert changes == []


@pytest.mark.ranks(2, 4)
def test_more_places_cost_what_they_say(world, real_group, changes) -> None:
    """Memory is asked for once, when the first trial is due, and not by groups that never come to it."""
    group = real_group(world)
    arena = group.backend._paths._arena
    small, large = torch.zeros(CHOICE_BYTES // 4 - 1), torch.zeros(MIB)
    for _ in range(100):
        group.all_reduce(small)
    assert arena.bytes_in_use == 0
    in_use = set()
    for _ in range(20):
        group.all_reduce(large)
        group.all_reduce(large[: CHOICE_BYTES // 4])
        in_use.add(arena.bytes_in_use)
    places = [group.backend._paths.room.scratch().place(turn, many=True) for turn in range(100)]
    group.close()
    assert len(set(places)) == many_places(world.size)
    assert max(in_use) == CHUNK_BYTES * (many_places(world.size) + 2)


@pytest.mark.ranks(2, 4)
def test_what_stays_is_made_at_once(world, real_group, changes, monkeypatch) -> None:
    """A view for a further place, made after a large tensor has gone, would lie where the next one wants to be."""
    made: list[int] = []

    def views_of(buffers, start, stop, dtype):
        made.append(stop - start)
        return node_scratch.views_of(buffers, start, stop, dtype)

    monkeypatch.setattr(node_choice, "PACE", replace(RESTLESS, first=10))
    monkeypatch.setattr(node_chunks, "views_of", views_of)
    group = real_group(world)
    tensor, after = torch.zeros(3 * MIB // 4), []  # four chunks of a size
    for _ in range(20):
        group.all_reduce(tensor)
        after.append(len(made))
    group.close()
    assert {True, False} <= set(changes)
    # For two places in the first call, for all others in the one that comes to them.
    assert {*after} == {after[0], after[0] // 2 * (2 + many_places(world.size))}
