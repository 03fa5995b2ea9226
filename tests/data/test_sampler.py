"""DistributedSampler against torch's own, and resumed in the middle of an epoch at other world sizes."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.compare import assert_same_on_all_ranks, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

import axonmpi as ax
from axonmpi.data import DistributedSampler

few = settings(max_examples=30)
lengths = st.integers(1, 60)
replicas = st.integers(1, 12)


def samplers(length: int, size: int, **options) -> list[DistributedSampler]:
    return [DistributedSampler(length, size, rank, **options) for rank in range(size)]


def take(sampler: DistributedSampler, count: int) -> list[int]:
    indices = iter(sampler)
    return [next(indices) for _ in range(count)]


def in_epoch_order(per_rank: list[list[int]]) -> list[int]:
    """Undo the dealing: what the ranks took, round by round."""
    return [index for one_round in zip(*per_rank, strict=True) for index in one_round]


# ---- the same as torch ------------------------------------------------------------------------------------


@few
@given(
    length=lengths,
    size=replicas,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-5, 2**62),
    epochs=st.lists(st.integers(0, 1000), max_size=3),
)
def test_indices_are_those_of_torch(length, size, shuffle, drop_last, seed, epochs) -> None:
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    for rank in range(size):
        ours = DistributedSampler(length, size, rank, **options)
        theirs = TorchSampler(range(length), size, rank, **options)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)
        for epoch in (0, *epochs):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert (list(ours), len(ours)) == (list(theirs), len(theirs))


def test_a_pass_draws_from_a_generator_of_its_own() -> None:
    sampler, state = DistributedSampler(50, 2, 0), torch.get_rng_state()
    expected = list(sampler)
    assert list(sampler) == expected  # without set_epoch the order repeats
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        assert list(DistributedSampler(50, 2, 0)) == expected
    assert {type(index) for index in expected} == {int}


def test_takes_a_dataset_or_its_length() -> None:
    datasets = (7, np.int64(7), range(7), "letters", torch.zeros(7, 2), torch.tensor([9]))
    assert [DistributedSampler(dataset, 1, 0).length for dataset in datasets] == [7, 7, 7, 7, 7, 1]
    alone = DistributedSampler(5, shuffle=False)  # before initialisation
    assert isinstance(alone, Sampler)
    assert (alone.num_replicas, alone.rank, list(alone)) == (1, 0, [0, 1, 2, 3, 4])


# ---- default rank and number of ranks ---------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_the_default_group_gives_rank_and_size(world) -> None:
    """Together ranks see every sample, and they agree on the state."""
    assert list(ax.DistributedSampler(10)) == list(TorchSampler(range(10), world.size, world.rank))
    more = ax.DistributedSampler(10, world.size + 2)
    assert (more.num_replicas, ax.DistributedSampler(10, rank=0).rank) == (world.size + 2, 0)
    wrong = f"rank: expected 0 to {world.size - 1} .* got {world.size}"
    refused(ValueError, (lambda: ax.DistributedSampler(10, rank=world.size), wrong))
    sampler = ax.DistributedSampler(23, seed=3)
    seen = [index for part in ax.all_gather_object(list(sampler)) for index in part]
    assert (set(seen), len(seen)) == (set(range(23)), -(-23 // world.size) * world.size)
    sampler.set_epoch(2)
    take(sampler, 3)
    assert_same_on_all_ranks(world, sampler.state_dict())


# ---- resuming ---------------------------------------------------------------------------------------------


def test_arguments_are_those_of_torch() -> None:
    dataset = list(range(17))
    for make in (
        lambda kind: kind(dataset, 3, 1, False, 5, True),
        lambda kind: kind(dataset=dataset, num_replicas=3, rank=2, shuffle=True, seed=5, drop_last=False),
    ):
        ours, theirs = make(DistributedSampler), make(TorchSampler)
        assert (list(ours), ours.dataset is theirs.dataset) == (list(theirs), True)
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch", "num_samples", "total_size")
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert list(DistributedSampler(dataset_or_length=4, num_replicas=1)) == list(DistributedSampler(4, 1))
    resumed = DistributedSampler(dataset, 3, 0)
    resumed.load_state_dict({**resumed.state_dict(), "position": 9})
    assert (len(resumed), resumed.num_samples, resumed.total_size) == (3, 6, 18)


@few
@given(
    length=lengths,
    sizes=st.lists(st.tuples(replicas, st.integers(0, 20)), max_size=4),
    last_size=replicas,
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_sample_comes_once_over_any_chain_of_world_sizes(length, sizes, last_size, shuffle, epoch) -> None:
    options = {"shuffle": shuffle, "seed": 17}
    reference = TorchSampler(range(length), 1, 0, **options)
    reference.set_epoch(epoch)
    order = list(reference)

    seen: list[int] = []
    state = DistributedSampler(length, 1, 0, **options).state_dict() | {"epoch": epoch}
    for size, wanted in [*sizes, (last_size, length)]:
        ranks = samplers(length, size, **options)
        for sampler in ranks:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        count = min(wanted, len(ranks[0]))
        seen += in_epoch_order([take(sampler, count) for sampler in ranks])
        states = [sampler.state_dict() for sampler in ranks]
        assert states == [states[0]] * size
        state = states[0]

    # The epoch in order, then, to fill the last round only, its first samples again.
    assert seen[:length] == order
    padding = seen[length:]
    assert padding == (order * (len(padding) // length + 1))[: len(padding)]
    assert len(padding) < max(size for size, _ in [*sizes, (last_size, 0)])


@few
@given(
    length=lengths,
    before=replicas,
    after=replicas,
    consumed=st.integers(0, 20),
    shuffle=st.booleans(),
)
def test_drop_last_leaves_out_less_than_one_round(length, before, after, consumed, shuffle) -> None:
    options = {"shuffle": shuffle, "drop_last": True}
    first = samplers(length, before, **options)
    consumed = min(consumed, len(first[0]))
    seen = in_epoch_order([take(sampler, consumed) for sampler in first])
    second = samplers(length, after, **options)
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
    seen += in_epoch_order([list(sampler) for sampler in second])
    assert max(Counter(seen).values(), default=1) == 1
    assert 0 <= length - len(seen) < after


def test_state_is_plain_and_survives_json() -> None:
    sampler = DistributedSampler(torch.zeros(10), np.int64(2), np.int64(0), seed=np.int64(4))
    take(sampler, np.int64(3))
    state = sampler.state_dict()
    expected = {"epoch": 0, "length": 10, "position": 6, "seed": 4, "shuffle": True}
    assert state == json.loads(json.dumps(state)) == expected
    assert [type(state[name]) for name in expected] == [int, int, int, int, bool]
    filled_up = DistributedSampler(10, 4, 0)
    list(filled_up)
    assert filled_up.state_dict()["position"] == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_consumed_counts_training_rather_than_prefetching(workers: int) -> None:
    dataset = TensorDataset(torch.arange(40))
    sampler = DistributedSampler(dataset, 2, 1)
    seen: list[int] = []
    batches = iter(DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers))
    for _ in range(2):
        seen += next(batches)[0].tolist()
    handed_out = sampler.state_dict()["position"]
    assert handed_out > 16 if workers else handed_out == 16
    state = sampler.state_dict(samples_consumed=len(seen))
    assert state["position"] == 16

    resumed = DistributedSampler(dataset, 2, 1)
    resumed.load_state_dict(state)
    seen += [index for (batch,) in DataLoader(dataset, 4, sampler=resumed) for index in batch.tolist()]
    assert seen == list(TorchSampler(dataset, 2, 1))


def resumed(position: int) -> DistributedSampler:
    sampler = DistributedSampler(10, 2, 0, shuffle=False)
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 3, "position": position})
    return sampler


WHOLE = [0, 2, 4, 6, 8]


def test_epochs_after_the_resumed_one_are_whole() -> None:
    for sets_epoch in (True, False):
        sampler, passes = resumed(6), []
        for epoch in range(3, 6):
            if sets_epoch:
                sampler.set_epoch(epoch)
            passes.append(list(sampler))
        assert passes == [[6, 8], WHOLE, WHOLE]
    finished = resumed(10)
    finished.set_epoch(3)
    assert [len(finished), *(list(finished) for _ in range(2))] == [0, [], WHOLE]


def test_samples_count_from_the_place_of_resumption() -> None:
    sampler = resumed(4)
    assert take(sampler, 2) == [4, 6]
    assert [sampler.state_dict(count)["position"] for count in (None, 1, 0)] == [8, 6, 4]


def test_what_loses_the_position_and_what_does_not() -> None:
    away = resumed(6)
    for epoch in (4, 3):
        away.set_epoch(epoch)
    assert list(away) == WHOLE
    peeked = resumed(6)
    take(peeked, 2)  # of the data, before the loop begins
    peeked.set_epoch(3)
    assert (peeked.state_dict()["position"], list(peeked)) == (6, [6, 8])
    left_early = resumed(4)
    take(left_early, 1)
    assert list(left_early) == [4, 6, 8]


def test_a_state_that_is_loaded_after_the_next_epoch_was_set() -> None:
    """By a loader that loads when it is iterated: one more pass is the next epoch, unless one is set."""
    orders = {epoch: epoch_of(epoch) for epoch in (3, 4, 5)}
    for position in (10, 8):
        for sets_epoch in (False, True):
            sampler = DistributedSampler(10, 1, 0)
            sampler.set_epoch(5)
            sampler.load_state_dict(sampler.state_dict() | {"epoch": 3, "position": position})
            if sets_epoch:
                sampler.set_epoch(3)
            assert (list(sampler), sampler.epoch) == (orders[3][position:], 3)
            following = 3 if sets_epoch else 5
            assert (list(sampler), sampler.epoch) == (orders[following], following)
            sampler.set_epoch(4)
            assert list(sampler) == orders[4]
    over = resumed(10)
    iter(over)
    assert list(over) == WHOLE


def epoch_of(epoch: int) -> list[int]:
    sampler = DistributedSampler(10, 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_length_stays_the_same_while_a_pass_goes_on() -> None:
    sampler = resumed(4)
    assert [*(len(sampler) for _ in sampler), len(sampler)] == [3, 3, 3, 3]
    old = iter(sampler)
    next(old)
    assert len(sampler) == 5
    sampler.set_epoch(4)
    next(old)  # counts for the epoch that it was of
    assert sampler.state_dict()["position"] == 0


# ---- bad input --------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((10, 4, 4), {}, ValueError, r"rank: expected 0 to 3 for num_replicas=4, got 4"),
        ((10, 4, -1), {}, ValueError, "rank: expected 0 to 3 .* got -1"),
        ((10, None, 1), {}, ValueError, r"rank: .*init_process_group\(\)"),
        ((10, 0, 0), {}, ValueError, "num_replicas: expected at least 1, got 0"),
        ((10, -2, 0), {}, ValueError, "num_replicas: expected at least 1, got -2"),
        ((10, 2.0, 0), {}, TypeError, "num_replicas: expected an integer, got 2.0"),
        ((10, 2, "0"), {}, TypeError, "rank: expected an integer, got '0'"),
        ((10, 2, True), {}, TypeError, "rank: expected an integer, got True"),
        ((0, 1, 0), {}, ValueError, "dataset: expected at least 1 sample, got 0"),
        (([], 1, 0), {}, ValueError, "dataset: expected at least 1 sample, got 0"),
        ((-3, 1, 0), {}, ValueError, "dataset: expected at least 1 sample, got -3"),
        ((2.5, 1, 0), {}, TypeError, r"dataset: expected a dataset with len\(\)"),
        ((Stream(), 1, 0), {}, TypeError, "got Stream; give the number of samples"),
        ((10, 1, 0), {"seed": 0.5}, TypeError, "seed: expected an integer, got 0.5"),
        ((10, 1, 0), {"seed": 2**64}, ValueError, "seed: expected seed"),
        ((10, 1, 0), {"seed": -(2**63) - 1}, ValueError, "seed: expected seed"),
    ],
)
def test_construction_refuses(arguments, options, error, message) -> None:
    with pytest.raises(error, match=message):
        DistributedSampler(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "value", "error", "message"),
    [
        ("set_epoch", -1, ValueError, "epoch: expected at least 0, got -1"),
        ("set_epoch", 1.0, TypeError, "epoch: expected an integer, got 1.0"),
        ("set_epoch", 2**63, ValueError, "seed: expected seed"),
        ("state_dict", 4, ValueError, "samples_consumed: expected at most 3, .* got 4"),
        ("state_dict", -1, ValueError, "samples_consumed: expected at least 0, got -1"),
        ("state_dict", 1.5, TypeError, "samples_consumed: expected an integer, got 1.5"),
        ("load_state_dict", {}, ValueError, "got none"),
        ("load_state_dict", [1, 2], TypeError, "got list"),
    ],
)
def test_other_calls_refuse(call, value, error, message) -> None:
    sampler = DistributedSampler(10, 2, 0, seed=2**63)
    take(sampler, 3)
    with pytest.raises(error, match=message):
        getattr(sampler, call)(value)
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 9}, ValueError, "state: expected length=10 as in this sampler, got length=9"),
        ({"seed": 5}, ValueError, "state: expected seed=0 as in this sampler, got seed=5"),
        ({"shuffle": False}, ValueError, "state: expected shuffle=True as in this sampler, got shuffle=False"),
        ({"position": 11}, ValueError, "position: expected at most 10"),
        ({"position": -1}, ValueError, "position: expected at least 0, got -1"),
        ({"position": 2.0}, TypeError, "position: expected an integer, got 2.0"),
        ({"epoch": -1}, ValueError, "epoch: expected at least 0, got -1"),
        ({"epoch": None}, TypeError, "epoch: expected an integer, got None"),
        ({"rank": 0}, ValueError, "state: expected the entries epoch, length, position, seed, shuffle"),
    ],
)
def test_load_state_dict_refuses_and_changes_nothing(change, error, message) -> None:
    sampler = DistributedSampler(10, 2, 0)
    sampler.set_epoch(1)
    take(sampler, 2)
    before = sampler.state_dict()
    with pytest.raises(error, match=message):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before
