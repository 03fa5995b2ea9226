"""The schedules, each a short generator of the actions that every rank computes (without torch).

In the pictures every action takes one column. `F2` is the forward of micro-batch 2; with several stages on a rank,
`F5.2` is the forward of stage 5 for micro-batch 2. B is backward; if it is divided, I is the gradient of the input
and W the gradient of the weights. All schedules add up the gradients of a stage in the order of micro-batches.

    schedule          stages on a rank    idle share of the time      activations held, of one stage and micro-batch
    gpipe             any number, loop    (p-1) / (chunks M + p-1)    chunks M
    1f1b              1                   (p-1) / (M + p-1)           p
    interleaved-1f1b  any number, loop    (p-1) / (chunks M + p-1)    chunks p + p-1
    zero-bubble       1                   (p-1) / (3 M + p-1)         p
    zero-bubble       2, as a V           (p-1) / (6 M + p-1)         2 p

This is for p ranks and M micro-batches, no fewer than p (for the V, 2 p - 1), if messages take no time, F, I and W
equally long, and B as I and W together. The last column is for the rank that holds most, with M a multiple of p;
with more stages on a rank each of them is smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import count, zip_longest

from ...utils.arguments import integer, member
from ...utils.partition import split_bounds
from .actions import Action, ActionKind, ComputeLists, Schedule, chain, check_edges
from .transfers import with_transfers

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


class PipelineSchedule(Enum):
    """The order in which the ranks of a pipeline compute; the value is its name on a command line."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"


def loop_placement(num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage if stages go round the ranks: 0, 1, 2, 0, 1, 2."""
    return tuple(range(num_ranks)) * chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage if stages go to the last rank and back: 0, 1, 2, 2, 1, 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def gpipe(num_ranks: int, num_microbatches: int, chunks: int = 1) -> ComputeLists:
    """GPipe (Huang et al. 2019): all micro-batches forward, then all of them backward.

        gpipe(3, 4)

        rank 0  F0 F1 F2 F3             B0 B1 B2 B3
        rank 1     F0 F1 F2 F3       B0 B1 B2 B3
        rank 2        F0 F1 F2 F3 B0 B1 B2 B3

    Every activation of the forward lives until its backward.

    Args:
        num_ranks: Ranks; stage s lives on rank s % num_ranks.
        num_microbatches: Micro-batches in a step.
        chunks: Stages on each rank.

    Raises:
        ValueError: A number is below 1.
    """

    def on_rank(rank: int) -> Iterator[Action]:
        stages = range(rank, num_ranks * chunks, num_ranks)
        for stage in stages:
            yield from _actions(_F, stage, num_microbatches)
        for stage in reversed(stages):
            yield from _actions(_B, stage, num_microbatches)

    return _each_rank(on_rank, num_ranks, num_microbatches, chunks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """1F1B (Narayanan et al. 2019): a rank begins with backward as soon as it can, then alternates.

        one_f_one_b(3, 5)

        rank 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
        rank 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
        rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    It waits as long as GPipe does, but rank r never holds the activations of more than num_ranks - r micro-batches.

    Args:
        num_ranks: Ranks, one stage on each.
        num_microbatches: Micro-batches in a step.

    Raises:
        ValueError: A number is below 1.
    """

    def on_rank(rank: int) -> Iterator[Action]:
        forwards, backwards = (_actions(kind, rank, num_microbatches) for kind in (_F, _B))
        ahead = num_ranks - 1 - rank
        yield from forwards[:ahead]
        yield from _in_turn(forwards[ahead:], backwards)

    return _each_rank(on_rank, num_ranks, num_microbatches)


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> ComputeLists:
    """Interleaved 1F1B (Narayanan et al. 2021): stages go round the ranks, so that the pipeline fills sooner.

        interleaved_one_f_one_b(2, 4, chunks=2)

        rank 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1      B2.2      B2.3 B0.2 B0.3
        rank 1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3

    Micro-batches go through in groups of num_ranks, or of some more where they cannot be divided so: each rank does
    the first of its stages for the whole group, then the second, and so on. With no fewer micro-batches than ranks
    it waits as long as 1F1B would with one such small stage on each rank. With one stage on each rank it is 1F1B.

    Args:
        num_ranks: Ranks; stage s lives on rank s % num_ranks.
        num_microbatches: Micro-batches in a step, any number.
        chunks: Stages on each rank.

    Raises:
        ValueError: A number is below 1.
    """
    if chunks == 1:
        return one_f_one_b(num_ranks, num_microbatches)

    def on_rank(rank: int) -> Iterator[Action]:
        stages = range(rank, num_ranks * chunks, num_ranks)
        bounds = split_bounds(num_microbatches, max(1, num_microbatches // num_ranks))
        groups = [range(*bound) for bound in bounds]
        forwards = [Action(_F, stage, m) for group in groups for stage in stages for m in group]
        backwards = [Action(_B, stage, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
        yield from forwards[:ahead]
        yield from _in_turn(forwards[ahead:], backwards)

    return _each_rank(on_rank, num_ranks, num_microbatches, chunks)


def zero_bubble(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """ZB-H1 (Qi et al. 2023): gradients of weights, which no other rank waits for, fill the gaps of 1F1B.

        zero_bubble(3, 5)

        rank 0  F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Rank r computes the gradients of weights r micro-batches late, so that all ranks hold the activations of at most
    num_ranks micro-batches, as the first one does in 1F1B.

    Args:
        num_ranks: Ranks, one stage on each.
        num_microbatches: Micro-batches in a step.

    Raises:
        ValueError: A number is below 1.
    """

    def on_rank(rank: int) -> Iterator[Action]:
        forwards, inputs, weights = (_actions(kind, rank, num_microbatches) for kind in (_F, _I, _W))
        ahead = num_ranks - 1 - rank
        yield from forwards[:ahead]
        yield from _in_turn(forwards[ahead:], inputs, [*[None] * rank, *weights])

    return _each_rank(on_rank, num_ranks, num_microbatches)


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """ZB-V (Qi et al. 2023): two stages on each rank, in a V, so that the last rank goes on without waiting.

        zero_bubble_v(2, 3)

        rank 0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
        rank 1       F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2

    With at least 2 * num_ranks - 1 micro-batches, and if all actions take equally long, a rank never waits between
    its first action and its last. It holds at most 2 * num_ranks activations, of stages half as large. With fewer
    micro-batches the order is the one for 2 * num_ranks - 1, without the micro-batches that do not exist.

    Args:
        num_ranks: Ranks; rank r has the stages r and 2 * num_ranks - 1 - r.
        num_microbatches: Micro-batches in a step.

    Raises:
        ValueError: A number is below 1.
    """
    total = max(num_microbatches, 2 * num_ranks - 1)

    def on_rank(rank: int) -> Iterator[Action]:
        first, second = rank, 2 * num_ranks - 1 - rank
        backward_first, backward_second = [(_I, first), (_W, first)], [(_I, second), (_W, second)]
        phases = [
            (2 * (num_ranks - rank) - 1, [(_F, first)]),
            (rank, [(_F, second), (_F, first)]),
            (num_ranks - rank, [(_F, second), *backward_second]),
            (total - num_ranks, [(_F, first), *backward_first, (_F, second), *backward_second]),
            (rank, [(_I, first), (_I, second)]),
            (num_ranks - rank, backward_first),
            (rank, [(_W, second)]),
            (rank, [(_W, first)]),
        ]
        numbers: defaultdict[tuple[ActionKind, int], Iterator[int]] = defaultdict(count)
        for times, steps in phases:
            for kind, stage in steps * times:
                yield Action(kind, stage, next(numbers[kind, stage]))

    lists = _each_rank(on_rank, num_ranks, num_microbatches)
    return tuple(tuple(action for action in actions if action.micro_batch < num_microbatches) for actions in lists)


def _actions(kind: ActionKind, stage: int, num_microbatches: int) -> list[Action]:
    """Return the actions of one kind of a stage, one for each micro-batch."""
    return [Action(kind, stage, m) for m in range(num_microbatches)]


def _in_turn(*lists: Sequence[Action | None]) -> Iterator[Action]:
    """Yield the first entry of each list, then the second of each, and so on; lists may end early or have gaps."""
    for entries in zip_longest(*lists):
        yield from (action for action in entries if action is not None)


def _each_rank(
    on_rank: Callable[[int], Iterable[Action]], num_ranks: int, num_microbatches: int, chunks: int = 1
) -> ComputeLists:
    """Make the lists of all ranks, once the numbers have been checked."""
    _check(num_ranks, num_microbatches, chunks)
    return tuple(tuple(on_rank(rank)) for rank in range(num_ranks))


def _check(num_ranks: int, num_microbatches: int, chunks: int) -> None:
    for name, number in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("chunks", chunks)):
        integer(name, number, minimum=1)


def make_schedule(
    kind: PipelineSchedule | str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 1,
    edges: Iterable[tuple[int, int]] | None = None,
) -> Schedule:
    """Make a schedule with its messages, ready to be run; the same on all ranks. Local.

    ONE_F_ONE_B with several stages on each rank is the interleaved schedule, INTERLEAVED_ONE_F_ONE_B with one is
    1F1B, and ZERO_BUBBLE with two is the V-shaped schedule.

    Args:
        kind: The schedule or its name.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches in a step.
        chunks: Stages on each rank.
        edges: Skip connections, pairs of stages with the lower one first, besides the chain of all stages.

    Raises:
        ValueError: A number is below 1, an edge does not lead from a stage to a later one, or ZERO_BUBBLE has more
            than two stages on a rank.
    """
    _check(num_ranks, num_microbatches, chunks)
    name, placement, lists = _compute_lists(
        member("kind", PipelineSchedule, kind), num_ranks, num_microbatches, chunks
    )
    pairs = tuple(sorted({*chain(len(placement)), *(() if edges is None else edges)}))
    check_edges(pairs, len(placement))
    return with_transfers(Schedule(name, placement, num_microbatches, lists, pairs))


def _compute_lists(
    kind: PipelineSchedule, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[str, tuple[int, ...], ComputeLists]:
    """Return the name of a schedule, the rank of each stage, and the actions that each rank computes."""
    loop = loop_placement(num_ranks, chunks)
    if kind is PipelineSchedule.GPIPE:
        return "GPipe", loop, gpipe(num_ranks, num_microbatches, chunks)
    if kind is not PipelineSchedule.ZERO_BUBBLE:
        name = "1F1B" if chunks == 1 else "interleaved 1F1B"
        return name, loop, interleaved_one_f_one_b(num_ranks, num_microbatches, chunks)
    if chunks == 1:
        return "zero bubble", loop, zero_bubble(num_ranks, num_microbatches)
    if chunks == 2:
        return "zero bubble, V-shaped", v_placement(num_ranks), zero_bubble_v(num_ranks, num_microbatches)
    raise ValueError(
        f"chunks: expected 1 or 2 stages on each rank for the zero-bubble schedule, got {chunks}; "
        "the interleaved 1F1B schedule takes any number"
    )
