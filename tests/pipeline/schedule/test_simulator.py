"""Simulated times and memory against the published bounds, and against times worked out by hand."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product, starmap

import pytest
from helpers.compare import refused
from helpers.pipelines import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, every_schedule, schedule_of

from axonmpi.pipeline import (
    Action,
    ActionKind,
    Costs,
    PipelineMemoryStats,
    ScheduleError,
    Span,
    Timeline,
    make_schedule,
    parse_action,
    simulate,
)
from axonmpi.pipeline.schedule.schedules import loop_placement, one_f_one_b
from axonmpi.pipeline.schedule.simulator import measured_costs

SIZES = [(ranks, micro_batches) for ranks in range(1, 6) for micro_batches in (1, 2, 3, 4, 6, 9, 12)]


# ---- published bounds -------------------------------------------------------------------------------------------


def test_gpipe_and_1f1b():
    for ranks, micro_batches in SIZES:
        gpipe, one = (simulate(make_schedule(kind, ranks, micro_batches)) for kind in (GPIPE, ONE_F_ONE_B))
        bubble = (ranks - 1) / (micro_batches + ranks - 1)
        assert (gpipe.bubble, one.bubble) == pytest.approx((bubble, bubble))
        assert gpipe.makespan == one.makespan == 3 * (micro_batches + ranks - 1)
        assert gpipe.peak_activations == (micro_batches,) * ranks
        assert one.peak_activations == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))
        assert PipelineMemoryStats.gpipe_peak_activations(ranks, micro_batches) == micro_batches
        assert PipelineMemoryStats.one_f_one_b_peak_activations(ranks, micro_batches) == min(ranks, micro_batches)


def test_interleaved_waits_less_by_the_number_of_chunks():
    for (ranks, micro_batches), chunks in product(SIZES, (2, 3)):
        timeline = simulate(make_schedule(INTERLEAVED, ranks, micro_batches, chunks))
        if micro_batches >= ranks:
            assert timeline.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
        if micro_batches % ranks == 0 and ranks > 1:
            most = min(chunks * ranks + ranks - 1, chunks * micro_batches)
            assert timeline.peak_activations[0] == max(timeline.peak_activations) == most
        assert max(timeline.peak_activations) <= chunks * micro_batches


def test_zero_bubble_waits_a_third_and_holds_as_much_as_1f1b():
    for ranks, micro_batches in SIZES:
        zero = simulate(make_schedule(ZERO_BUBBLE, ranks, micro_batches))
        one = simulate(make_schedule(ONE_F_ONE_B, ranks, micro_batches))
        assert max(zero.peak_activations) == max(one.peak_activations) == min(ranks, micro_batches)
        if micro_batches >= ranks:
            assert zero.makespan - 3 * micro_batches == ranks - 1 == (one.makespan - 3 * micro_batches) / 3
        assert zero.makespan <= one.makespan


def test_the_v_waits_only_for_its_first_and_after_its_last_action():
    for ranks, micro_batches in SIZES:
        timeline = simulate(make_schedule(ZERO_BUBBLE, ranks, micro_batches, 2))
        assert max(timeline.peak_activations) <= min(2 * ranks, 2 * micro_batches)
        if micro_batches >= 2 * ranks - 1:
            assert timeline.makespan == 6 * micro_batches + ranks - 1
            for rank, spans in enumerate(timeline.spans):
                assert spans[0].start == rank
                assert all(before.end == after.start for before, after in pairwise(spans))


# ---- times ------------------------------------------------------------------------------------------------------


def spans_of(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans]


def test_times_by_hand():
    costs = Costs(forward=[1.0, 2.0], backward=(3.0, 4.0), transfer=0.5)
    timeline = simulate(make_schedule(ONE_F_ONE_B, 2, 2), costs)
    assert spans_of(timeline) == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 8, 11), ("B0.1", 14, 17)],
        [("F1.0", 1.5, 3.5), ("B1.0", 3.5, 7.5), ("F1.1", 7.5, 9.5), ("B1.1", 9.5, 13.5)],
    ]
    expected = 17, (2, 1), (1 - 8 / 17, 1 - 12 / 17)
    assert (timeline.makespan, timeline.peak_activations, timeline.bubbles) == expected
    assert timeline.bubble == pytest.approx(1 - 20 / 34)


def test_transfers_within_a_rank_take_no_time():
    timeline = simulate(make_schedule(GPIPE, 1, 2, 3), Costs(transfer=100.0))
    assert (timeline.makespan, timeline.bubble) == (2 * 3 * 3, 0)


def test_rendezvous_makes_a_sender_wait_for_a_late_receiver():
    schedule = schedule_of(one_f_one_b(2, 4), loop_placement(2), 4)
    costs = Costs(forward=[1.0, 10.0], backward=[1.0, 10.0])
    eager, waiting = (simulate(schedule, costs, rendezvous=value) for value in (False, True))
    assert eager.makespan == waiting.makespan == 1 + 4 * 20 + 1
    posted_late = make_schedule(GPIPE, 2, 4)
    starts = [simulate(posted_late, costs, rendezvous=value).spans[0][3].start for value in (False, True)]
    assert starts == [3.0, 11.0]  # the third message waits until the first has been used


def test_no_rank_is_quicker_under_rendezvous():
    for schedule, _ in every_schedule((1, 2, 4), (1, 3, 6)):
        eager, waiting = (simulate(schedule, Costs(transfer=0.3), rendezvous=value) for value in (False, True))
        for own, other in zip(eager.spans, waiting.spans, strict=True):
            assert [span.action for span in own] == [span.action for span in other]
            assert all(first.start <= second.start for first, second in zip(own, other, strict=True))


def test_a_schedule_that_never_ends():
    schedule = schedule_of(one_f_one_b(2, 1), (0, 1), 1)
    without = tuple(tuple(a for a in actions if str(a) != "SB1.0>0") for actions in schedule.actions)
    refused(
        ScheduleError,
        (
            partial(simulate, replace(schedule, actions=without)),
            r"(?s)rank 0, step 3, stage 0, micro-batch 0: deadlock.*\[B0\.0\]",
        ),
    )


def test_costs_and_sizes_are_checked():
    names, too_few = ("forward", "backward", "backward_input", "backward_weight", "transfer"), Costs(forward=[1.0])
    refused(
        ValueError,
        *((partial(Costs, **{name: -1.0}), f"{name}: expected times of at least 0, got -1") for name in names),
        (partial(Costs, forward=[1.0, float("nan")]), "forward: expected times of at least 0"),
        (partial(PipelineMemoryStats.gpipe_peak_activations, 2, 0), "num_microbatches: expected at least 1, got 0"),
        (partial(simulate, make_schedule(GPIPE, 2, 1), too_few), r"each stage, got 1 times, but there is F1\.0"),
    )


def test_costs_that_were_measured():
    schedule = make_schedule(ZERO_BUBBLE, 2, 5, 2)
    costs = Costs(forward=[1, 2, 3, 4], backward_input=[5, 6, 7, 8], backward_weight=[2, 2, 1, 1])
    timeline = simulate(schedule, costs)
    measured = measured_costs(timeline)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    for action in starmap(Action, product(kinds, range(4), [0])):
        assert measured.of(action) == pytest.approx(costs.of(action))
    assert simulate(schedule, measured).makespan == pytest.approx(timeline.makespan)


def test_a_timeline_that_begins_late_and_an_empty_one():
    spans = Span(parse_action("F0.0"), 10.0, 11.0), Span(parse_action("B0.0"), 12.0, 14.0)
    late = Timeline("late", (spans,))
    assert (late.start, late.end, late.makespan, late.bubbles) == (10, 14, 4, (0.25,))
    empty = Timeline("empty", ((), ()))
    assert (empty.makespan, empty.bubble, empty.peak_activations) == (0, 0, (0, 0))
