"""Texts that the watchdog prints before it ends a job: cause, states of the ranks, stacks."""

from __future__ import annotations

from collections.abc import Mapping

from ..record.reader import Condition
from ..utils.text import lines_of_ranks, name_ranks, ranks_by_text
from .wait_graph import wait_graph_of
from .waits import RankState, closed_by


def table_of(states: Mapping[int, RankState]) -> str:
    """Return an indented line for each state, with its ranks; local."""
    texts = {rank: f"({state.record.host}) {state}" for rank, state in states.items()}
    return "  " + lines_of_ranks(ranks_by_text(texts).items())


def cause_of(states: Mapping[int, RankState], stuck: Mapping[int, set[int]]) -> str:
    """Return the reason for which ranks are stuck, in a line; local.

    Args:
        states: States of the ranks of this node.
        stuck: Result of `stuck_ranks`, not empty.
    """
    awaited = set().union(*stuck.values())
    closed = {other for rank in stuck for other in stuck[rank] & closed_by(states[rank], states)}
    reasons = (
        ("has ended", {rank for rank in awaited if states[rank].condition is Condition.GONE}),
        ("is stopped", {rank for rank in awaited if states[rank].condition is Condition.STOPPED}),
        ("has come to the end of its program", {rank for rank in awaited if states[rank].is_ending}),
        ("has closed the group", closed),
    )
    for reason, culprits in reasons:
        if culprits:
            return _while_others_wait(states, stuck, culprits, reason)
    waits = [
        f"rank {rank} waits for {name_ranks(others)} in {states[rank].operation}"
        for rank, others in sorted(stuck.items())[:8]
    ]
    odd = wait_graph_of(states, len(states)).behind
    return f"ranks wait for each other, look at {name_ranks(odd)} first: {'; '.join(waits)}"


def _while_others_wait(
    states: Mapping[int, RankState], stuck: Mapping[int, set[int]], culprits: set[int], reason: str
) -> str:
    waiting = {rank for rank, awaited in stuck.items() if awaited & culprits and not states[rank].is_ending}
    hosts = ", ".join(sorted({states[rank].record.host for rank in culprits}))
    if len(culprits) > 1:
        reason = reason.replace("has ", "have ").replace("is ", "are ").replace(" its ", " their ")
    text = f"{name_ranks(culprits)} on {hosts} {reason}"
    if not waiting:
        return text
    first = states[min(waiting)].operation
    return f"{text} while {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in {first}"


def text_of_stacks(stacks: Mapping[int, str]) -> str:
    """Return stacks by rank, equal stacks once; local."""
    return "\n".join(f"stack of {name_ranks(ranks)}:\n{text}" for text, ranks in ranks_by_text(stacks).items())
