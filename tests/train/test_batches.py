"""Which sequences a step trains on, and who takes which."""

import pytest
import torch
from helpers.compare import refused

from axonmpi.train.batches import IGNORED, BatchPlan, Stream, held_out_batches, seeded_generator

TEXT = (torch.arange(5000) * 7 % 256).to(torch.uint8)


def plan(replica=0, replicas=1, accumulation=1, seed=3):
    return BatchPlan(
        global_batch=12, sequence_length=9, accumulation=accumulation, replica=replica, replicas=replicas, seed=seed
    )


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 3), (2, 1), (4, 3)])
def test_ranks_divide_the_same_global_batch(ranks, accumulation):
    whole = torch.cat([inputs for inputs, _ in plan().batches(5, TEXT)])
    of_ranks = [list(plan(rank, ranks, accumulation).batches(5, TEXT)) for rank in range(ranks)]
    assert [len(parts) for parts in of_ranks] == [accumulation] * ranks
    assert torch.equal(torch.cat([inputs for parts in of_ranks for inputs, _ in parts]), whole.view(12, 9))


def test_targets_are_the_following_bytes():
    ((inputs, targets),) = plan().batches(1, TEXT)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == torch.int64
    assert torch.equal(targets[:, -1], TEXT[plan().starts(1, len(TEXT)) + 9].long())


def test_batches_depend_on_seed_and_step_only():
    others = (plan(replica=1, replicas=2, accumulation=2), 4), (plan(), 5), (plan(seed=4), 4)
    starts = plan().starts(4, 5000)
    assert [torch.equal(other.starts(step, 5000), starts) for other, step in others] == [True, False, False]


def test_the_last_sequence_of_the_text_can_be_drawn_and_none_beyond():
    assert torch.cat([plan().starts(step, 12) for step in range(50)]).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "accumulation"), [(5, 1), (2, 4), (24, 1)])
def test_a_batch_that_does_not_divide_is_refused(ranks, accumulation):
    message = rf"ranks x accumulation = {ranks} x {accumulation} .*got 12.*take"
    refused(ValueError, (lambda: plan(0, ranks, accumulation), message))


def test_streams_and_steps_are_unrelated_and_reproducible():
    draws = {
        (stream, step): torch.rand(4, generator=seeded_generator(0, stream, step))
        for stream in Stream
        for step in range(3)
    }
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == len(draws)
    seeded_generator(2**100, Stream.DATA, 1)  # seeds may be large
    assert torch.equal(torch.rand(4, generator=seeded_generator(0, Stream.DATA, 2)), draws[Stream.DATA, 2])


@pytest.mark.parametrize(("ranks", "sequences"), [(1, 0), (2, 7), (3, 40), (4, 1), (4, 0)])
def test_held_out_sequences_are_divided_and_do_not_overlap(ranks, sequences):
    text = torch.arange(101)  # 12 sequences of 8 and their targets
    scored, rounds = [], set()
    for rank in range(ranks):
        batches = list(held_out_batches(text, 8, most=sequences, batch=3, replica=rank, replicas=ranks))
        rounds.add(len(batches))
        for inputs, targets in batches:
            assert 1 <= len(inputs) <= 3
            if (targets == IGNORED).all():  # a rank that keeps others company
                continue
            assert torch.equal(targets, inputs + 1)
            scored += targets.flatten().tolist()
    assert (len(rounds), len(set(scored)), len(scored)) == (1, len(scored), 8 * min(sequences or 12, 12))


def test_few_held_out_sequences_are_spread_over_the_text():
    ((inputs, _),) = held_out_batches(torch.arange(97), 8, most=3, batch=3, replica=0, replicas=1)
    assert inputs[:, 0].tolist() == [0, 32, 64]
