"""What a job's ranks do, in words: a line for each place, with the ranks that are there."""

from __future__ import annotations

from collections.abc import Mapping

from ..record.reader import Condition
from ..utils.text import lines_of_ranks, name_ranks, ranks_by_text
from .wait_graph import wait_graph_of
from .waits import RankState, closed_by


def table_of(states: Mapping[int, RankState]) -> str:
    """Return an indented line for each place, with its ranks; local."""
    places = {rank: f"({state.record.host}) {state}" for rank, state in states.items()}
    return "  " + lines_of_ranks(ranks_by_text(places).items())


def cause_of(states: Mapping[int, RankState], stuck: Mapping[int, set[int]]) -> str:
    """Say in a line why ranks wait in vain: who is gone, stopped, at its end or out of the group, or who waits."""
    awaited = set().union(*stuck.values())
    for condition in (Condition.GONE, Condition.STOPPED):
        if culprits := {rank for rank in awaited if states[rank].condition is condition}:
            return _while_others_wait(states, stuck, culprits, condition.value)
    if culprits := {rank for rank in awaited if states[rank].is_ending}:
        return _while_others_wait(states, stuck, culprits, "has come to the end of its program")
    if culprits := {other for rank in stuck for other in stuck[rank] & closed_by(states[rank], states)}:
        return _while_others_wait(states, stuck, culprits, "has closed the group")
    waits = (
        f"rank {rank} waits for {name_ranks(awaited)} in {states[rank].operation}"
        for rank, awaited in sorted(stuck.items())
    )
    odd = wait_graph_of(states, len(states)).behind
    return f"ranks wait for each other, look at {name_ranks(odd)} first: " + "; ".join(list(waits)[:8])


def _while_others_wait(
    states: Mapping[int, RankState], stuck: Mapping[int, set[int]], culprits: set[int], what: str
) -> str:
    waiting = {rank for rank, awaited in stuck.items() if awaited & culprits and not states[rank].is_ending}
    hosts = ", ".join(sorted({states[rank].record.host for rank in culprits}))
    words = _of_several(what) if len(culprits) > 1 else what
    text = f"{name_ranks(culprits)} on {hosts} {words}"
    if not waiting:
        return text
    first = states[min(waiting)].operation
    return f"{text} while {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in {first}"


def _of_several(what: str) -> str:
    return what.replace("has ", "have ").replace("is ", "are ").replace(" its ", " their ")


def text_of_stacks(stacks: Mapping[int, str]) -> str:
    """Return stacks by rank, the same ones once; local."""
    return "\n".join(f"stack of {name_ranks(ranks)}:\n{text}" for text, ranks in ranks_by_text(stacks).items())
