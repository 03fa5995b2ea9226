"""Who waits for whom in a job, and why, in words: pure functions of where its ranks are.

    ranks 0, 2 in all_reduce, collective 17 of their group ──▶ rank 1, which has called 16 of them ──▶ nobody

An arrow leads from a rank that waits to each rank that has not done its part (`judgement`). Ranks at the ends of
arrows that wait for nobody are *behind*: they are what has to be looked at. If every arrow leads on, ranks wait in
a circle. Ranks in the same place are one class, as in STAT (Arnold et al., Stack Trace Analysis for Large Scale
Debugging, 2007).
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..record.reader import Condition, Operation
from ..record.writer import Phase
from ..utils.processes import age
from ..utils.text import counted, name_ranks
from .waits import RankState, awaited_by

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARY = re.compile(rf"{re.escape(_PACKAGE)}|/site-packages/|/lib/python3[.\d]*/|<frozen ")
"""Files of which users did not write the lines."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current t|T)hread 0x(?P<ident>[0-9a-f]+)")


@dataclass(frozen=True)
class WaitGraph:
    """What the ranks of a job wait for.

    Attributes:
        size: Ranks of the job.
        states: Where the ranks are that are known, by rank.
        sites: Where their programs are, as "train.py:12 in step", as far as that is known, by rank.
        classes: Places in words, with the ranks that are there; the largest class first.
        waits: For each rank that waits the ranks that it waits for.
        behind: Ranks that others wait for, and that wait for nobody; if all wait in a circle, the ranks of it that
            are in another place than most.
        is_circle: Whether every rank that is waited for waits itself.
        unknown: Ranks of the job whose place is not known.
    """

    size: int
    states: Mapping[int, RankState]
    sites: Mapping[int, str]
    classes: Sequence[tuple[str, tuple[int, ...]]]
    waits: Mapping[int, frozenset[int]]
    behind: tuple[int, ...]
    is_circle: bool
    unknown: tuple[int, ...]

    @property
    def sentences(self) -> list[str]:
        """Who waits for whom and why, a sentence for each rank behind or for the circle."""
        if self.is_circle:
            odd = name_ranks(self.behind)
            return [f"ranks wait for each other in a circle, so none goes on; look at {odd} first"]
        return [self._sentence(rank) for rank in self.behind]

    def _sentence(self, rank: int) -> str:
        waiting = [other for other, ranks in self.waits.items() if rank in ranks]
        first = self.states[min(waiting, key=lambda other: (self.states[other].is_ending, other))]
        text = f"{name_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for rank {rank}"
        if first.operation is not None:
            text += f" in {_words(first, first.operation)}"
        return f"{text}, and rank {rank} {_reason(self.states[rank], first, self.sites.get(rank, ''))}"


def wait_graph_of(states: Mapping[int, RankState], size: int, sites: Mapping[int, str] | None = None) -> WaitGraph:
    """Find out who waits for whom; local.

    Args:
        states: Of the ranks that are known.
        size: Ranks of the job.
        sites: Where their programs are.
    """
    known, sites = dict(sorted(states.items())), sites or {}
    waits = {
        rank: frozenset(awaited)
        for rank, state in known.items()
        if state.waits and (awaited := awaited_by(rank, known))
    }
    # At its end a rank waits for all others, which may have much to do: that alone makes nobody late.
    late = {rank for waiting, ranks in waits.items() if not known[waiting].is_ending for rank in ranks}
    behind = sorted(rank for rank in late if rank not in waits or known[rank].is_ending)
    is_circle = bool(late) and not behind
    return WaitGraph(
        size=size,
        states=known,
        sites=sites,
        classes=_classes(known, sites),
        waits=waits,
        behind=tuple(_odd(known, waits, late) if is_circle else behind),
        is_circle=is_circle,
        unknown=tuple(sorted(set(range(size)) - set(known))),
    )


def _odd(known: Mapping[int, RankState], waits: Mapping[int, frozenset[int]], circle: Iterable[int]) -> list[int]:
    """Return the ranks of a circle that fewest others are in the same operation with, and that most wait for."""

    def place(rank: int) -> object:
        operation = known[rank].operation
        group = None if operation is None or operation.group is None else operation.group.key
        return None if operation is None else (group, operation.name, operation.call)

    company = Counter(map(place, known))
    waiting = Counter(rank for awaited in waits.values() for rank in awaited)
    oddness = {rank: (-company[place(rank)], waiting[rank]) for rank in sorted(circle)}
    return [rank for rank, odd in oddness.items() if odd == max(oddness.values())]


# ---- words ------------------------------------------------------------------------------------------------------


def _classes(known: Mapping[int, RankState], sites: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, state in known.items():
        place = _place(state)
        ranks[f"{place}, at {sites[rank]}" if sites.get(rank) else place].append(rank)
    return [(place, tuple(found)) for place, found in sorted(ranks.items(), key=lambda item: -len(item[1]))]


def _place(state: RankState) -> str:
    """Say where a rank is, without what differs between ranks in the same place, such as times."""
    parts = []
    if state.operation is not None:
        parts.append(_words(state, state.operation))
    elif not state.is_ending:
        parts.append("outside of collectives")
    if state.phase is not Phase.OTHER:
        parts.append("at the end of its program" if state.is_ending else state.phase.name.lower())
    if state.condition is not Condition.LIVES:
        parts.append(f"its process {state.condition.value}")
    return ", ".join(parts)


def _words(state: RankState, operation: Operation) -> str:
    """Return an operation in words; its group is told from others of the same ranks: all made them in one order."""
    group = operation.group
    if group is None or not operation.call:
        return str(operation)
    alike = [each.key for each in state.record.groups if str(each) == str(group)]
    which = f", number {alike.index(group.key) + 1} of {len(alike)} such" if len(alike) > 1 else ""
    return f"{operation}, collective {operation.call} of {group}{which}"


def _reason(state: RankState, waiting: RankState, site: str) -> str:
    """Say why a rank has not done its part for one that waits."""
    during = "" if state.phase in (Phase.OTHER, Phase.ENDING) else f" during its {state.phase.name.lower()}"
    where = f" in {state.operation}" if state.operation is not None else during
    if state.condition is Condition.STOPPED:
        reason = f"is stopped by a signal (SIGSTOP or SIGTSTP){where}"
    elif state.condition in (Condition.GONE, Condition.TRACED):
        reason = f"{state.condition.value}{where}"
    elif state.is_ending:
        reason = "has come to the end of its program"
    else:
        place = where if state.operation is not None else f" outside of collectives{during}"
        reason = f"has been{place} for {seconds_in(state):.0f} s" + (f" at {site}" if site else "")
    operation = waiting.operation
    if operation is None or operation.group is None or not operation.call:
        return reason
    group = state.record.group(operation.group.key)
    if group is None:
        return reason
    closed = ", which it has closed" if group.is_closed else ""
    return f"{reason}, after {counted(group.count, 'collective')} of that group{closed}"


def seconds_in(state: RankState) -> float:
    """Return how long a rank has been in its operation, or outside of all; local.

    It is right for a rank of another node as far as the clocks of the nodes agree.
    """
    identity: dict[str, int] = state.record.identity
    if state.operation is not None:
        since = state.operation.entered
    else:
        since = max((each.left or 0 for each in state.record.operations()), default=0)
        if not since:
            return age(identity["started"])
    return max(0.0, (time.time_ns() - identity["wall_clock"] - since) / 1e9)


# ---- stacks -----------------------------------------------------------------------------------------------------


def site_in(stacks: str, thread: int) -> str:
    """Return the user's line in the stack of a thread, as "train.py:12 in step"; empty if there is none; local.

    Args:
        stacks: What faulthandler has written, innermost frames first.
        thread: The thread's identity.
    """
    is_wanted = False
    for line in stacks.splitlines():
        if head := _THREAD.match(line):
            is_wanted = int(head["ident"], 16) == thread
        elif is_wanted and (frame := _FRAME.match(line)) and not _LIBRARY.search(frame["file"]):
            return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['function']}"
    return ""
