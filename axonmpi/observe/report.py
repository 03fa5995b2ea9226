"""What a job's ranks do, in words: a line for each place, with the ranks that are there."""

from __future__ import annotations

from collections.abc import Mapping

from ..utils.text import lines_of_ranks, name_ranks, ranks_by_text
from .board import Condition
from .diagnosis import diagnose
from .judgement import Standing, closed_by


def table_of(standings: Mapping[int, Standing]) -> str:
    """Return an indented line for each place, with its ranks; local."""
    places = {rank: f"({standing.page.host}) {standing}" for rank, standing in standings.items()}
    return "  " + lines_of_ranks(ranks_by_text(places).items())


def cause_of(standings: Mapping[int, Standing], in_vain: Mapping[int, set[int]]) -> str:
    """Say in a line why ranks wait in vain: who is gone, stopped, at its end or out of the group, or who waits."""
    awaited = set().union(*in_vain.values())
    for condition in (Condition.GONE, Condition.STOPPED):
        if culprits := {rank for rank in awaited if standings[rank].condition is condition}:
            return _while_others_wait(standings, in_vain, culprits, condition.value)
    if culprits := {rank for rank in awaited if standings[rank].is_ending}:
        return _while_others_wait(standings, in_vain, culprits, "has come to the end of its program")
    if culprits := {other for rank in in_vain for other in in_vain[rank] & closed_by(standings[rank], standings)}:
        return _while_others_wait(standings, in_vain, culprits, "has closed the group")
    waits = (
        f"rank {rank} waits for {name_ranks(awaited)} in {standings[rank].operation}"
        for rank, awaited in sorted(in_vain.items())
    )
    odd = diagnose(standings, len(standings)).behind
    return f"ranks wait for each other, look at {name_ranks(odd)} first: " + "; ".join(list(waits)[:8])


def _while_others_wait(
    standings: Mapping[int, Standing], in_vain: Mapping[int, set[int]], culprits: set[int], what: str
) -> str:
    waiting = {rank for rank, awaited in in_vain.items() if awaited & culprits and not standings[rank].is_ending}
    hosts = ", ".join(sorted({standings[rank].page.host for rank in culprits}))
    words = _of_several(what) if len(culprits) > 1 else what
    text = f"{name_ranks(culprits)} on {hosts} {words}"
    if not waiting:
        return text
    first = standings[min(waiting)].operation
    return f"{text} while {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in {first}"


def _of_several(what: str) -> str:
    return what.replace("has ", "have ").replace("is ", "are ").replace(" its ", " their ")


def text_of_stacks(stacks: Mapping[int, str]) -> str:
    """Return stacks by rank, the same ones once; local."""
    return "\n".join(f"stack of {name_ranks(ranks)}:\n{text}" for text, ranks in ranks_by_text(stacks).items())
