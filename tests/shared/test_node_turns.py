"""Turns in scratch memory: few places or many, whichever is quicker, the same on all ranks; and right results."""

from __future__ import annotations

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
from axonmpi.backends import node_turns
from axonmpi.backends.node_scratch import CHUNK_BYTES, Scratch
from axonmpi.backends.node_turns import Pace, PlaceChoice, many_places
from axonmpi.backends.reduction import DTYPES

RESTLESS = Pace(first=1, shortest=2, longest=2, trial=3, unsettled=1, least_bytes=1, gain=1e9)
"""Whatever was measured, each trial is a change."""
MIB = 1 << 20
NEAR, FAR = 2e-5, 2e-4


class Board:
    """Stands for the words that ranks show each other: seen after the next barrier only."""

    def __init__(self, ranks: int) -> None:
        self.shown = [(0, 0)] * ranks
        self.written = list(self.shown)

    def barrier(self) -> None:
        self.shown = list(self.written)

    def member(self, rank: int) -> BoardMember:
        return BoardMember(self, rank)


class BoardMember:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def vote(self, few: int, many: int) -> None:
        self.board.written[self.rank] = few, many

    def votes(self) -> list[tuple[int, int]]:
        return self.board.shown


class Node:
    """Ranks that copy one chunk a turn; `seconds` of a rank and a number of places, as the test sets it."""

    def __init__(self, ranks: int, pace: Pace | None = None) -> None:
        self.board = Board(ranks)
        self.choices = [PlaceChoice(self.board.member(rank), pace) for rank in range(ranks)]
        self.count = 0
        self.used: list[bool] = []

    def turn(self, seconds, nbytes=lambda rank: MIB) -> None:
        for choice in self.choices:
            choice.begin(self.count)
            if choice.is_due:
                choice.start_trial()
        assert len({choice.many for choice in self.choices}) == 1
        many = self.choices[0].many
        self.used.append(many)
        for rank, choice in enumerate(self.choices):
            choice.note(self.count, nbytes(rank), seconds(rank, many))
        self.board.barrier()
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
    assert not node.choices[0].chosen
    for _ in range(1000):
        node.turn(lambda rank, many: 2 * NEAR if many and rank == 0 else NEAR / (2 if many else 1))
    assert node.choices[0].chosen


def test_a_small_gain_changes_nothing() -> None:
    node = Node(2)
    for _ in range(2000):
        node.turn(by_places(few=NEAR, many=0.95 * NEAR))
    assert not node.choices[0].chosen
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


@pytest.mark.parametrize("nbytes", [lambda rank: 0, lambda rank: 100])
def test_small_copies_say_nothing(nbytes) -> None:
    node = Node(2)
    for _ in range(1000):
        node.turn(by_places(few=FAR, many=NEAR), nbytes)
    assert not node.choices[0].chosen


def test_ranks_that_write_nothing_leave_it_to_the_others() -> None:
    """As in a broadcast, where only the root writes."""
    node = Node(4)
    for _ in range(1000):
        node.turn(by_places(few=FAR, many=NEAR), lambda rank: MIB if rank == 2 else 0)
    assert node.choices[0].chosen


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
        least_bytes=st.just(1),
        gain=st.sampled_from([0.5, 1.0, 1e9]),
    ),
    seed=st.integers(0, 1000),
)
def test_whatever_is_measured_all_ranks_do_the_same(ranks, pace, seed) -> None:
    """`Node.turn` compares them in every turn; where the next chunk comes only some barriers later, too."""
    node, random = Node(ranks, pace), np.random.default_rng(seed)
    for _ in range(200):
        node.turn(lambda rank, many: random.random(), lambda rank: int(random.integers(0, 3)))
        for _ in range(random.integers(0, 2)):
            node.board.barrier()
            node.count += 1
    assert {True, False} == set(node.used)


def test_how_many_places() -> None:
    counts = [many_places(ranks) for ranks in range(1, 200)]
    assert all(count % 2 == 0 and count >= 4 for count in counts)  # even: see Turns
    assert counts == sorted(counts, reverse=True)
    assert max(2 * CHUNK_BYTES * count * ranks for ranks, count in enumerate(counts[:8], 1)) <= 64 * MIB


# ---- on ranks -------------------------------------------------------------------------------------------------


@pytest.fixture
def changes(monkeypatch):
    """Let real ranks change the number of places all the time; returns what each trial began with."""
    begun: list[bool] = []
    start = PlaceChoice.start_trial

    def start_trial(choice) -> None:
        begun.append(choice.chosen)
        start(choice)

    monkeypatch.setattr(node_turns, "PACE", RESTLESS)
    monkeypatch.setattr(PlaceChoice, "start_trial", start_trial)
    return begun


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
        monkeypatch.setattr(node_turns, "PACE", pace)
        group = world.new_group(range(world.size))
        for _ in range(5):
            tensor = torch.from_numpy(values[world.rank].copy())
            group.all_reduce(tensor)
            assert tensor.numpy().tobytes() == expected.tobytes()
        group.close()


@pytest.mark.ranks(2, 4)
def test_without_memory_for_more_places_two_serve(world, real_group, changes, monkeypatch) -> None:
    group = real_group(world)
    asked = []

    def widen(scratch, arena, places) -> bool:
        asked.append(places)
        return False

    monkeypatch.setattr(Scratch, "widen", widen)
    line = torch.arange(5 * MIB // 4, dtype=torch.int32)
    for repeat in range(5):
        tensor = line * (world.rank + repeat)
        group.all_reduce(tensor)
        assert torch.equal(tensor, line * (world.size * (world.size - 1) // 2 + repeat * world.size))
    group.close()
    assert asked == [many_places(world.size)]
    assert changes == []


@pytest.mark.ranks(2, 4)
def test_more_places_cost_what_they_say(world, real_group, changes) -> None:
    """Memory is asked for once, when the first trial is due, and not for groups that never come to it."""
    group = real_group(world)
    arena = group.backend._paths._arena
    tensor = torch.zeros(MIB)
    assert arena.bytes_in_use == 0
    group.all_reduce(tensor)
    for _ in range(4):
        group.all_reduce(tensor)
        assert arena.bytes_in_use == 2 * CHUNK_BYTES * many_places(world.size)
    group.close()
