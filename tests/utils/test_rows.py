"""Plans of rows against numpy's padding of the whole, and exchanges carried out on lists."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.utils.rows import MODES, Exchange, RowPlan, row_plan

PADDING = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
FAR = 9
"""Rows beyond the ends, more than some tensors have."""


@st.composite
def plans(draw: st.DrawFn) -> RowPlan:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum))
    starts = draw(st.lists(st.integers(-FAR, sum(sizes) + FAR), min_size=len(sizes), max_size=len(sizes)))
    ends = [draw(st.integers(start, sum(sizes) + FAR)) for start in starts]
    return row_plan(tuple(sizes), tuple(zip(starts, ends, strict=True)), draw(st.sampled_from(MODES)))


def carried_out(exchange: Exchange, shown: list[list[float]]) -> list[list[list[float]]]:
    """What each rank takes, piece by piece."""
    assert exchange.shown == tuple(map(len, shown))
    return [[shown[source][start:stop] for source, start, stop in pieces] for pieces in exchange.wanted]


@settings(max_examples=300, derandomize=True, database=None)
@given(plans())
def test_results_are_the_padded_whole_and_come_back_to_their_owners(plan: RowPlan) -> None:
    total, ranks = sum(plan.sizes), range(len(plan.sizes))
    whole = np.arange(1.0, total + 1)
    first = [0, *accumulate(plan.sizes)]
    parts = [whole[first[rank] : first[rank + 1]].tolist() for rank in ranks]
    padded = np.pad(whole, FAR + FAR, PADDING[plan.mode])  # numpy repeats a pattern as often as it takes
    back = np.zeros((len(ranks), total))

    shown = [[row for low, high in plan.shown[rank] for row in parts[rank][low:high]] for rank in ranks]
    for rank, taken in zip(ranks, carried_out(plan.forward, shown), strict=True):
        result = np.zeros(plan.rows(rank))
        for run, rows in zip(plan.foreign(rank), taken, strict=True):
            result[run.at : run.at + len(rows)] = rows
        for run in plan.own(rank):
            result[run.at : run.at + run.stop - run.start] = parts[rank][run.start : run.stop]
        start, stop = plan.ranges[rank]
        assert result.tolist() == padded[2 * FAR + start : 2 * FAR + stop].tolist()
        beyond = {row for low, high in plan.beyond(rank) for row in range(low, high)}
        assert beyond == {row for row in range(stop - start) if result[row] == 0}
        for value in result[result > 0]:
            back[rank, int(value) - 1] += 1

    given = [[row for run in plan.foreign(rank) for row in [1.0] * (run.stop - run.start)] for rank in ranks]
    for rank, taken in zip(ranks, carried_out(plan.transposed, given), strict=True):
        returned = np.zeros(plan.sizes[rank])
        for run, rows in zip(plan.returned(rank), taken, strict=True):
            returned[run.start : run.stop] += rows
        others = np.delete(back, rank, axis=0).sum(axis=0)
        assert returned.tolist() == others[first[rank] : first[rank + 1]].tolist()


def test_rows_that_several_need_are_shown_once() -> None:
    plan = row_plan((4, 4, 4), ((0, 6), (0, 12), (3, 12)), "zeros")
    assert plan.shown == (((0, 4),), ((0, 4),), ((0, 4),))
    assert plan.forward.shown == (4, 4, 4)
    halos = row_plan((4, 4, 4), ((-1, 5), (3, 9), (7, 13)), "circular")
    assert halos.shown == (((0, 1), (3, 4)), ((0, 1), (3, 4)), ((0, 1), (3, 4)))


def test_a_tensor_without_rows_has_none_to_repeat() -> None:
    assert row_plan((0, 0), ((0, 2), (0, 0)), "zeros").beyond(0) == [(0, 2)]
    with pytest.raises(ValueError, match="mode: expected 'zeros' for a tensor without rows, got 'circular'"):
        row_plan((0, 0), ((0, 2), (0, 0)), "circular")
