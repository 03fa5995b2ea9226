"""Schedules against the pictures in their docstrings, and against torch's tables."""

import inspect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.compare import refused
from helpers.pipelines import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    computed,
    every_schedule,
    last_of_backward,
    schedule_of,
)
from helpers.torch_tables import torch_actions, torch_lists, torch_schedules

from axonmpi.pipeline import (
    Action,
    ActionKind,
    Costs,
    PipelineSchedule,
    Schedule,
    make_schedule,
    parse_action,
    simulate,
)
from axonmpi.pipeline.schedule import schedules, transfers
from axonmpi.pipeline.schedule.chart import text_chart
from axonmpi.pipeline.schedule.validator import validate

GENERATORS = ("gpipe", "one_f_one_b", "interleaved_one_f_one_b", "zero_bubble", "zero_bubble_v")
USED_BY = {
    ActionKind.FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECV_BACKWARD,
    ActionKind.BACKWARD_INPUT: ActionKind.RECV_BACKWARD,
}
"""The kind of receive whose tensor a computation needs."""
ONE_COLUMN_EACH = Costs(forward=1, backward=1, backward_input=1, backward_weight=1)
NAMES = r"(\w+)\((\d+), (\d+)(?:, chunks=(\d+))?\)"


# ---- pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_the_picture_in_the_docstring(name):
    text = inspect.getdoc(getattr(schedules, name))
    call, *numbers = re.search(rf"^ +{NAMES}$", text, re.MULTILINE).groups()
    ranks, micro_batches, chunks = (int(number or 1) for number in numbers)
    picture = [line.strip() for line in text.splitlines() if re.match(r" +rank \d", line)]
    lists = getattr(schedules, name)(ranks, micro_batches, *([chunks] if numbers[2] else []))
    v_shaped = name == "zero_bubble_v"
    placement = schedules.v_placement(ranks) if v_shaped else schedules.loop_placement(ranks, chunks)

    assert (call, len(picture)) == (name, ranks)
    for rank, line in enumerate(picture):
        drawn = [cell if "." in cell else f"{cell[0]}{rank}.{cell[1:]}" for cell in line.split()[2:]]
        assert drawn == list(map(str, lists[rank]))
    timeline = simulate(schedule_of(lists, placement, micro_batches), ONE_COLUMN_EACH)
    assert text_chart(timeline).splitlines() == picture


def test_the_short_form_of_actions():
    for text in ("F2.3", "B0.0", "I12.7", "W1.10", "SF2.3>4", "RF4.3<2", "SB4.3>2", "RB2.3<4"):
        assert str(parse_action(text)) == text
    assert parse_action("SF2.3>4") == Action(ActionKind.SEND_FORWARD, 2, 3, peer=4)
    pairs = ("SF2.3>4", "RF4.3<2"), ("RB2.3<4", "SB4.3>2"), ("SB4.3>2", "RB2.3<4")
    for text, other in pairs:
        assert str(parse_action(text).counterpart()) == other
    no_actions = ("", "X1.2", "F1", "F1.2 ", "F1.2>3", "SF1.2", "SF1.2<3", "RB1.2>3", "F01.2", "f1.2")
    refused(ValueError, *((partial(parse_action, text), "expected an action such as") for text in no_actions))
    refused(ValueError, (parse_action("F0.0").counterpart, r"expected a transfer with a peer, got F0\.0"))


# ---- what all schedules have in common --------------------------------------------------------------------------


def test_gradients_are_added_up_in_the_order_of_micro_batches():
    for schedule, _ in every_schedule(range(1, 5), (1, 4, 7)):
        kinds = (ActionKind.FORWARD, last_of_backward(schedule))
        for (stage, rank), kind in itertools.product(enumerate(schedule.placement), kinds):
            found = [a.micro_batch for a in computed(schedule, rank) if (a.kind, a.stage) == (kind, stage)]
            assert found == list(range(schedule.num_microbatches)), schedule.name


def test_names_of_schedules():
    assert [kind.value for kind in PipelineSchedule] == ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"]
    assert make_schedule(ONE_F_ONE_B, 3, 5, 2) == make_schedule(INTERLEAVED, 3, 5, 2)
    assert make_schedule(INTERLEAVED, 3, 5) == make_schedule(ONE_F_ONE_B, 3, 5)
    assert make_schedule(ZERO_BUBBLE, 3, 5, 2).placement == (0, 1, 2, 2, 1, 0)
    assert make_schedule(GPIPE, 3, 5, 2).placement == (0, 1, 2, 0, 1, 2)
    assert schedules.interleaved_one_f_one_b(3, 5, 1) == schedules.one_f_one_b(3, 5)


def test_what_a_schedule_knows():
    schedule = make_schedule(ZERO_BUBBLE, 3, 5, 2)
    assert (schedule.num_stages, schedule.num_ranks, schedule.num_microbatches) == (6, 3, 5)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert schedule.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert (schedule.splits_backward, make_schedule(GPIPE, 3, 5).splits_backward) == (True, False)
    assert Schedule("by hand", (0, 1, 2), 1, ((), (), ())).edges == ((0, 1), (1, 2))


def test_numbers_that_make_no_schedule():
    make, pairs = make_schedule, r"edges: expected different pairs of stages from 0 to 1, .* got \(0, 2\)"
    refused(
        ValueError,
        (partial(make, GPIPE, 0, 1), "num_ranks: expected at least 1, got 0"),
        (partial(make, ONE_F_ONE_B, 1, 0), "num_microbatches: expected at least 1, got 0"),
        (partial(make, ZERO_BUBBLE, 1, 1, 0), "chunks: expected at least 1, got 0"),
        (partial(make, ZERO_BUBBLE, 2, 1, 3), "1 or 2 stages on each rank for the zero-bubble schedule, got 3"),
        (partial(make, GPIPE, 2, 1, 1, [(0, 2)]), pairs),
        (partial(make, GPIPE, 2, 1, 1, [(1, 0)]), r"the lower one first, got \(1, 0\)"),
        (partial(make, "gpipes", 2, 1), "kind: expected an axonmpi.PipelineSchedule, GPIPE, .*, got 'gpipes'"),
    )
    for generator in (getattr(schedules, name) for name in GENERATORS):
        calls = [partial(generator, 0, 3), partial(generator, 3, 0), partial(generator, -1, -1)]
        refused(ValueError, *((call, r"num_\w+: expected at least 1, got") for call in calls))


def test_schedules_need_no_torch():
    for path in Path(schedules.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"^ *(?:from|import) +(torch|numpy)\b", text, re.MULTILINE) == []


# ---- transfers --------------------------------------------------------------------------------------------------


def test_the_messages_in_the_docstring():
    shown = re.findall(r"^    rank \d +(.+) \.\.\.$", transfers.__doc__, re.MULTILINE)
    lists = make_schedule(ONE_F_ONE_B, 2, 4).actions
    assert [line.split() for line in shown] == [[str(action) for action in own[:11]] for own in lists]


def test_sends_follow_what_they_send_and_few_receives_are_open():
    for schedule, chunks in every_schedule((2, 3, 5), (1, 4, 9)):
        if chunks == 1 or schedule.splits_backward:
            assert most_open_receives(schedule) <= 2
        for before, action in itertools.chain.from_iterable(map(itertools.pairwise, schedule.actions)):
            if action.kind.is_send and not before.kind.is_send:
                assert before.makes == action.carries


def most_open_receives(schedule: Schedule) -> int:
    """The most receives that are posted and not used yet, of one edge in one direction."""
    most = 0
    for actions in schedule.actions:
        unused = Counter()
        for action in actions:
            if action.kind.is_receive:
                unused[action.kind, action.stage, action.peer] += 1
                most = max(most, *unused.values())
            used = USED_BY.get(action.kind), action.stage
            unused.subtract([key for key in unused if key[:2] == used])
        assert not +unused
    return most


def messages_between(schedule: Schedule, *, sends: bool) -> dict[tuple[int, int], list[Action]]:
    """The receives of the messages from each rank to each other, in the order of sends or of receives."""
    found: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in itertools.chain.from_iterable(schedule.actions):
        if action.kind.is_send if sends else action.kind.is_receive:
            source, target = (schedule.placement[stage] for stage in action.line)
            found[source, target].append(action.counterpart() if sends else action)
    return found


def test_a_rank_receives_from_another_one_in_the_order_in_which_that_one_sends():
    """Messages between GPUs have no tags."""
    checked = 0
    for schedule, _ in every_schedule((2, 3, 5), (1, 5, 8)):
        stages = range(schedule.num_stages)
        skipping = make_again(schedule, [(first, last) for first in stages for last in stages[first + 2 :: 3]])
        for one in (schedule, skipping):
            sent = messages_between(one, sends=True)
            assert messages_between(one, sends=False) == sent
            assert all(sent.values())
            checked += len(sent)
    assert checked > 500


def make_again(schedule: Schedule, skips: list[tuple[int, int]]) -> Schedule:
    """The same computations with skip connections."""
    lists = tuple(tuple(computed(schedule, rank)) for rank in range(schedule.num_ranks))
    made = schedule_of(lists, schedule.placement, schedule.num_microbatches, (*schedule.edges, *skips))
    validate(made)
    return made


def test_receives_in_another_order_come_earlier_not_later():
    """A schedule of one's own may post them anywhere before they are needed."""
    moved = 0
    for schedule, _ in every_schedule((2, 4), (1, 4, 7)):
        late = replace(schedule, actions=tuple(map(receives_just_in_time, schedule.actions)))
        ordered = transfers.in_order_of_sends(late)
        assert simulate(ordered).makespan == simulate(schedule).makespan  # sends of GPUs do not wait
        assert messages_between(ordered, sends=False) == messages_between(late, sends=True)
        for before, after in zip(late.actions, ordered.actions, strict=True):
            receives = [action for action in before if action.kind.is_receive]
            assert [a for a in before if a not in receives] == [a for a in after if a not in receives]
            assert all(done(after, receive) <= done(before, receive) for receive in receives)
            moved += before != after
        assert transfers.in_order_of_sends(ordered) == ordered
    assert moved


def receives_just_in_time(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Each receive directly before the first action that needs it."""
    posted = [action for action in actions if action.kind.is_receive]
    made: list[Action] = []
    for action in [action for action in actions if action not in posted]:
        key = USED_BY.get(action.kind), action.stage, action.micro_batch
        made += [receive for receive in posted if (receive.kind, receive.stage, receive.micro_batch) == key]
        made.append(action)
    return tuple(made)


def done(actions: Sequence[Action], receive: Action) -> int:
    """The number of other actions of a rank before it posts a receive."""
    return sum(not action.kind.is_receive for action in actions[: actions.index(receive)])


def test_skip_connections_have_messages_of_their_own():
    schedule = make_schedule(ONE_F_ONE_B, 4, 6, edges=[(0, 3), (0, 1)])
    assert schedule.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    sent = Counter((a.stage, a.peer) for actions in schedule.actions for a in actions if a.kind.is_send)
    assert sent == {edge: 6 for source, target in schedule.edges for edge in ((source, target), (target, source))}
    assert most_open_receives(schedule) <= 4  # as many as there are ranks on the way


def test_actions_that_can_never_begin_have_no_place_for_messages():
    lists = [[parse_action("B0.0"), parse_action("F0.0")], [parse_action("F1.0"), parse_action("B1.0")]]
    refused(
        ValueError,
        (
            partial(transfers.with_transfers, Schedule("turned", (0, 1), 1, lists)),
            r"wait for ever: rank 0 at step 0, B0\.0, rank 1 at step 0, F1\.0",
        ),
    )


# ---- torch's tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "generator", "chunks"),
    [
        ("ScheduleGPipe", schedules.gpipe, 1),
        ("ScheduleInterleaved1F1B", schedules.interleaved_one_f_one_b, 2),
        ("ScheduleInterleaved1F1B", schedules.interleaved_one_f_one_b, 3),
        ("ScheduleInterleavedZeroBubble", schedules.zero_bubble, 1),
        ("ScheduleZBVZeroBubble", schedules.zero_bubble_v, 2),
    ],
)
def test_the_order_is_that_of_torch(name, generator, chunks):
    given = [chunks] if generator is schedules.interleaved_one_f_one_b else []
    for ranks, rounds in itertools.product((1, 2, 3, 5), (1, 3)):
        assert generator(ranks, rounds * ranks, *given) == torch_lists(name, ranks, rounds * ranks, chunks)


def test_1f1b_is_that_of_torch():
    """Torch's table of it counts the last rank's forwards from 1, so these are compared by kind."""
    for ranks, more in itertools.product(range(1, 6), (0, 1, 7)):
        ours = schedules.one_f_one_b(ranks, ranks + more)
        theirs = torch_lists("Schedule1F1B", ranks, ranks + more, 1)
        assert [[a.kind for a in own] for own in ours] == [[a.kind for a in own] for own in theirs]
        assert ours[:-1] == theirs[:-1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ScheduleLoopedBFS", GPIPE),
        ("ScheduleInterleaved1F1B", INTERLEAVED),
        ("ScheduleInterleavedZeroBubble", ZERO_BUBBLE),
    ],
)
def test_no_more_time_and_memory_than_torch_where_the_order_differs(name, kind):
    for ranks, micro_batches in ((2, 8), (3, 5), (3, 6), (4, 6), (4, 8)):
        lists = torch_lists(name, ranks, micro_batches, 2)
        theirs = simulate(schedule_of(lists, schedules.loop_placement(ranks, 2), micro_batches))
        ours = simulate(make_schedule(kind, ranks, micro_batches, 2))
        assert (ours.makespan, ours.bubble) <= (theirs.makespan, theirs.bubble + 1e-9), (ranks, micro_batches)
        assert max(ours.peak_activations) <= max(theirs.peak_activations), (ranks, micro_batches)


def test_torch_finds_our_schedules_valid_and_makes_the_same_messages():
    kinds = {"SEND_F": "SF", "RECV_F": "RF", "SEND_B": "SB", "RECV_B": "RB"}
    for schedule, _ in every_schedule((1, 2, 3, 5), (1, 5)):
        lists = {rank: torch_actions(computed(schedule, rank)) for rank in range(schedule.num_ranks)}
        placement = torch_schedules()._validate_schedule(
            lists, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        )
        assert placement == dict(enumerate(schedule.placement))
        made = torch_schedules()._add_send_recv(lists, schedule.placement.__getitem__, schedule.num_stages)
        for rank, actions in enumerate(schedule.actions):
            theirs = {
                (kinds[a.computation_type.value], a.stage_index, a.microbatch_index)
                for a in made[rank][:]
                if a.computation_type.value in kinds
            }
            assert theirs == {(a.kind.value, a.stage, a.micro_batch) for a in actions if not a.kind.is_compute}
