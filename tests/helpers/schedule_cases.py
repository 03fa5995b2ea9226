"""Schedules that tests go through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from axonmpi.pipeline import Action, ActionKind, PipelineSchedule, Schedule, make_schedule
from axonmpi.pipeline.schedule.actions import ComputeLists
from axonmpi.pipeline.schedule.transfers import with_transfers

GPIPE, ONE_F_ONE_B = PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B
INTERLEAVED, ZERO_BUBBLE = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE

CHUNKS = {GPIPE: (1, 2, 3), ONE_F_ONE_B: (1,), INTERLEAVED: (2, 3), ZERO_BUBBLE: (1, 2)}


def every_schedule(ranks: Iterable[int], micro_batches: Iterable[int]) -> Iterator[tuple[Schedule, int]]:
    """Each kind of schedule for all of these numbers, and its stages on each rank."""
    for kind, chunks in CHUNKS.items():
        for num_ranks in ranks:
            for num_microbatches in micro_batches:
                for number in chunks:
                    yield make_schedule(kind, num_ranks, num_microbatches, number), number


def schedule_of(lists: ComputeLists, placement: tuple[int, ...], num_microbatches: int, edges=()) -> Schedule:
    """A schedule of lists without transfers."""
    return with_transfers(Schedule("made by hand", placement, num_microbatches, lists, edges))


def computed(schedule: Schedule, rank: int) -> list[Action]:
    """What a rank computes, in order."""
    return [action for action in schedule.actions[rank] if action.kind.is_compute]


def last_of_backward(schedule: Schedule) -> ActionKind:
    """The action that ends a backward."""
    return ActionKind.BACKWARD_WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
