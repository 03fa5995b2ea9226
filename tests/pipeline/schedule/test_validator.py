"""The validator against every schedule, against random placements, and against schedules made wrong on purpose."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
from helpers import REPOSITORY
from helpers.compare import refused
from helpers.pipelines import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, every_schedule, schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.pipeline import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    make_schedule,
    parse_action,
    simulate,
    validate,
)
from axonmpi.pipeline.schedule import schedule_error

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def by_hand(*ranks: str, placement=(0, 1), micro_batches: int = 1, edges=()) -> Schedule:
    """A schedule from the short forms of its actions."""
    actions = tuple(tuple(map(parse_action, own.split())) for own in ranks)
    return Schedule("by hand", placement, micro_batches, actions, edges)


# ---- valid ones -------------------------------------------------------------------------------------------------


def test_every_schedule_is_valid():
    for schedule, _ in every_schedule((1, 2, 3, 6), (1, 2, 3, 5, 8)):
        validate(schedule)
    for kind, chunks in itertools.product((GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE), (1, 2)):
        last = 4 * chunks - 1
        for edges in ([(0, last)], [(0, 2), (1, 3)], [(0, last), (0, 2), (1, last)]):
            validate(make_schedule(kind, 4, 6, chunks, edges))


def test_by_hand():
    for schedule in (
        by_hand("F0.0 SF0.0>1 RB0.0<1 B0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"),
        by_hand("RB0.0<1 F0.0 SF0.0>1 I0.0 W0.0", "RF1.0<0 F1.0 I1.0 W1.0 SB1.0>0"),
        by_hand("F0.0 F1.0 B1.0 B0.0", placement=(0, 0)),
    ):
        validate(schedule)


@st.composite
def placements(draw):
    """Some stages on some ranks, each rank with one at least, edges, and how to choose an order."""
    num_ranks = draw(st.integers(1, 4))
    owners = draw(st.permutations([*range(num_ranks), *draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))]))
    pairs = list(itertools.combinations(range(len(owners)), 2))
    skips = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    edges = tuple(sorted({*skips, *itertools.pairwise(range(len(owners)))}))
    return tuple(owners), draw(st.integers(1, 3)), edges, draw(st.booleans()), draw(st.integers(0, 2**32))


@settings(max_examples=60)
@given(placements())
def test_messages_for_any_placement_and_any_order_are_valid(case):
    placement, micro_batches, edges, split, seed = case
    lists = tuple(tuple(own) for own in any_order(placement, micro_batches, edges, split, random.Random(seed)))
    validate(schedule_of(lists, placement, micro_batches, edges))


def any_order(placement, micro_batches: int, edges, split: bool, chance: random.Random) -> list[list[Action]]:
    """What each rank computes, in a random order that its data allows."""
    on_one_rank = Schedule("any", (0,) * len(placement), micro_batches, (), edges)
    kinds = (FORWARD, INPUT, WEIGHT) if split else (FORWARD, BACKWARD)
    left = [Action(kind, s, m) for kind in kinds for s in range(len(placement)) for m in range(micro_batches)]
    made, lists = set(), [[] for _ in set(placement)]
    while left:
        action = chance.choice([action for action in left if made.issuperset(on_one_rank.needs(action))])
        left.remove(action)
        made.add(action.makes)
        lists[placement[action.stage]].append(action)
    return lists


# ---- wrong ones -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            ("F0.0 SF0.0>1 RB0.0<1", "RF1.0<0 F1.0 B1.0 SB1.0>0"),
            "rank 0, step 3, stage 0, micro-batch 0: B0.0 is miss",
        ),
        (("F0.0 SF0.0>1 RB0.0<1 I0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"), "rank 0, step 4, .*: W0.0 is missing"),
        (("F0.0 SF0.0>1 B0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"), "rank 0, step 3, .*: RB0.0<1 is missing"),
        (("F0.0 RB0.0<1 B0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"), "rank 0, step 3, .*: SF0.0>1 is missing"),
        (("F0.0 F0.0", "F1.0 B1.0"), "rank 0, step 1, .*: F0.0 is there twice, at step 0 already"),
        (("F0.0 F1.0", "B1.0"), "rank 0, step 1, stage 1, .*: F1.0 belongs to rank 1, where stage 1 lives"),
        (("F0.1", "F1.0"), "rank 0, step 0, stage 0, micro-batch 1: F0.1: expected a micro-batch from 0 to 0"),
        (("F2.0", "F1.0"), "rank 0, step 0, stage 2, .*: F2.0: expected a stage from 0 to 1"),
        (("SB0.0>1", ""), "SB0.0>1: there is no edge between stages 0 and 1 in this direction"),
        (
            ("F0.0 SF0.0>1 RB0.0<1 B0.0 I0.0 W0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"),
            "I0.0: the backward is there as a whole",
        ),
        (
            ("F0.0 SF0.0>1 RB0.0<1 W0.0 I0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"),
            "W0.0 needs I0.0 before it, which is at step 4",
        ),
        (("SF0.0>1 F0.0 RB0.0<1 B0.0", "RF1.0<0 F1.0 B1.0 SB1.0>0"), "step 0, .*: SF0.0>1 needs F0.0 before it"),
        (
            ("F0.0 SF0.0>1 RB0.0<1 B0.0", "F1.0 RF1.0<0 B1.0 SB1.0>0"),
            "rank 1, step 0, .*: F1.0 needs RF1.0<0 before",
        ),
        (
            ("F0.0 SF0.0>1 RB0.0<1 B0.0", "RF1.0<0 B1.0 F1.0 SB1.0>0"),
            "rank 1, step 1, .*: B1.0 needs F1.0 before it",
        ),
    ],
)
def test_what_is_wrong_is_named(ranks, message):
    refused(ScheduleError, (partial(validate, by_hand(*ranks)), message.replace(".0", r"\.0")))


def test_transfers_without_a_need_and_what_is_missing_after_the_end():
    peerless = Schedule("by hand", (0,), 1, ((Action(ActionKind.SEND_FORWARD, 0, 0),),))
    on_one_rank = by_hand("F0.0 SF0.0>1", placement=(0, 0))
    refused(
        ScheduleError,
        (partial(validate, peerless), "expected a peer for a transfer"),
        (partial(validate, on_one_rank), "stages 0 and 1 live on one rank and need no message"),
        (partial(validate, by_hand("F0.0", placement=(0,))), r"(?m)^rank 0 +F0\.0 +\[no B0\.0\]$"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "expected at least 1 stage and 1 micro-batch, got 2 and 0"),
        ({"placement": ()}, "expected at least 1 stage and 1 micro-batch, got 0 and 1"),
        ({"placement": (0, 0)}, r"placement: expected stages on all of 2 ranks, got \(0, 0\)"),
        ({"placement": (0, 2)}, r"placement: expected stages on all of 2 ranks, got \(0, 2\)"),
        ({"edges": ((0, 2),)}, r"edges: .*got \(0, 2\)"),
        ({"edges": ((0, 1), (0, 1))}, r"edges: expected different pairs of stages"),
    ],
)
def test_numbers_that_do_not_fit(changes, message):
    refused(ValueError, (partial(validate, replace(by_hand("F0.0", "F1.0"), **changes)), message))


def test_the_place_is_shown():
    schedule = make_schedule(ONE_F_ONE_B, 3, 4)
    lists = [list(actions) for actions in schedule.actions]
    lists[1].append(lists[1].pop(lists[1].index(parse_action("RB1.0<2"))))
    with pytest.raises(ScheduleError) as caught:
        validate(replace(schedule, actions=tuple(map(tuple, lists))))
    step = caught.value.step
    assert (caught.value.rank, str(lists[1][step])) == (1, "B1.0")
    first, heads, *rows = str(caught.value).splitlines()
    needs = "B1.0 needs RB1.0<2 before it, which is at step 23"
    assert first == f"1F1B, rank 1, step {step}, stage 1, micro-batch 0: {needs}"
    assert heads.split() == [str(number) for number in range(step - 4, step + 5)]
    assert rows[1][heads.index(f" {step} ") + 1 :].startswith("[B1.0]")


def test_the_error_in_the_docstring_and_on_the_page():
    schedule = make_schedule(ONE_F_ONE_B, 2, 2)
    first, second = schedule.actions
    with pytest.raises(ScheduleError) as caught:
        validate(replace(schedule, actions=(first, (second[2], *second))))
    assert str(caught.value) in schedule_error.__doc__.replace("\n    ", "\n")
    assert f"```text\n{caught.value}\n```" in (REPOSITORY / "docs/schedules.md").read_text(encoding="utf-8")


def test_a_deadlock_where_sends_wait():
    """Each rank sends before it posts the receive that the other one's send waits for."""
    late = by_hand(
        "F0.0 SF0.0>1 RF3.0<2 F3.0 RB0.0<1 B3.0 SB3.0>2 B0.0",
        "F2.0 SF2.0>3 RF1.0<0 F1.0 RB2.0<3 B1.0 SB1.0>0 B2.0",
        placement=(0, 1, 1, 0),
        edges=((0, 1), (2, 3)),
    )
    assert simulate(late).makespan > 0
    message = (
        r"rank 0, step 1, stage 0, .* wait for their receives .*rank 0 at step 1, SF0\.0>1, rank 1 at step 1, SF2"
    )
    refused(
        ScheduleError,
        (partial(validate, late), message),
        (partial(validate, late), r"(?s) \[SF0\.0>1\].* \[SF2\.0>3\]"),
        (partial(simulate, late, rendezvous=True), "deadlock"),
    )


def test_a_deadlock_without_rendezvous():
    stuck = by_hand(
        "RF2.0<1 RB0.0<1 F0.0 F2.0 SF0.0>1 B2.0 SB2.0>1 B0.0",
        "RF1.0<0 RB1.0<2 F1.0 SF1.0>2 B1.0 SB1.0>0",
        placement=(0, 1, 0),
    )
    refused(
        ScheduleError,
        (partial(validate, stuck), r"sends never wait \(eager\).*rank 0 at step 3, F2\.0, rank 1 at step 2, F1\.0"),
    )


# ---- mutations --------------------------------------------------------------------------------------------------


def test_mutations_are_rejected():
    chance = random.Random(0)
    valid = [schedule for schedule, _ in every_schedule(range(2, 5), range(2, 6))]
    for mutate in (dropped, doubled, moved, renumbered, hurried, postponed):
        for schedule in chance.sample(valid, 20):
            lists = [list(actions) for actions in schedule.actions]
            mutate(lists, schedule, chance)
            refused(ScheduleError, (partial(validate, replace(schedule, actions=tuple(map(tuple, lists)))), "rank"))


def dropped(lists, schedule, chance) -> None:
    own = chance.choice(lists)
    own.pop(chance.randrange(len(own)))


def doubled(lists, schedule, chance) -> None:
    own = chance.choice(lists)
    own.insert(chance.randrange(len(own) + 1), chance.choice(own))


def moved(lists, schedule, chance) -> None:
    source, target = chance.sample(lists, 2)
    target.insert(chance.randrange(len(target) + 1), source.pop(chance.randrange(len(source))))


def renumbered(lists, schedule, chance) -> None:
    own = chance.choice(lists)
    at = chance.randrange(len(own))
    others = [m for m in range(schedule.num_microbatches + 1) if m != own[at].micro_batch]
    own[at] = replace(own[at], micro_batch=chance.choice(others))


def hurried(lists, schedule, chance) -> None:
    """A send before the action that makes what it sends."""
    own = chance.choice([own for own in lists if any(action.kind.is_send for action in own)])
    at = chance.choice([step for step, action in enumerate(own) if action.kind.is_send])
    maker = next(step for step, action in enumerate(own) if action.makes == own[at].carries)
    own.insert(maker, own.pop(at))


def postponed(lists, schedule, chance) -> None:
    """A receive after all actions, one of which needs it."""
    own = chance.choice([own for own in lists if any(action.kind.is_receive for action in own)])
    own.append(own.pop(chance.choice([step for step, action in enumerate(own) if action.kind.is_receive])))
