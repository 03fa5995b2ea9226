"""The graph of ranks that wait for ranks, with its explanation in words, as `axonmpi why` prints it.

    ranks 0, 2 in all_reduce, collective 17 of their group ──▶ rank 1, which has called 16 of them

An edge leads from a waiting rank to each rank that has not called its part (`waits.py`). Ranks that others wait for
and that wait for nobody are *behind*: they are the ranks to look at. If every awaited rank waits itself, the ranks
wait in a circle. Ranks in the same state are one class, as in STAT (Arnold et al., Stack Trace Analysis for Large
Scale Debugging, 2007). All functions are pure.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..record.layout import Phase
from ..record.reader import Condition, Operation
from ..utils.processes import age
from ..utils.text import counted, name_ranks
from .waits import RankState, awaited_by

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARY = re.compile(rf"{re.escape(_PACKAGE)}|/site-packages/|/lib/python3[.\d]*/|<frozen ")
"""Files that are not the user's."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current t|T)hread 0x(?P<ident>[0-9a-f]+)")


@dataclass(frozen=True)
class WaitGraph:
    """The waits of a job's ranks.

    Attributes:
        size: Number of ranks of the job.
        states: States of the known ranks, by rank.
        sites: Lines of the ranks' programs, as "train.py:12 in step", by rank; known lines only.
        classes: States in words, with the ranks in each; the largest class first.
        waits: Edges: for each waiting rank the ranks that it waits for.
        behind: Ranks that others wait for, and that wait for nobody; in a circle, the ranks of it with the rarest
            operation.
        is_circle: True if every awaited rank waits itself.
        unknown: Ranks of the job without a known state.
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
        """The explanation: a sentence for each rank behind, or one for the circle."""
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
    """Return the graph of the waits of a job's ranks; local.

    Args:
        states: States of the known ranks, by rank.
        size: Number of ranks of the job.
        sites: Lines of the ranks' programs, by rank.
    """
    known, sites = dict(sorted(states.items())), sites or {}
    awaited = {rank: frozenset(awaited_by(rank, known)) for rank, state in known.items() if state.waits}
    waits = {rank: ranks for rank, ranks in awaited.items() if ranks}
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
    """Return the ranks of a circle with the rarest operation, and of these the ranks that most others wait for."""

    def operation_of(rank: int) -> object:
        operation = known[rank].operation
        group = None if operation is None or operation.group is None else operation.group.key
        return None if operation is None else (group, operation.name, operation.call)

    company = Counter(map(operation_of, known))
    waiting = Counter(rank for awaited in waits.values() for rank in awaited)
    oddness = {rank: (-company[operation_of(rank)], waiting[rank]) for rank in sorted(circle)}
    return [rank for rank, odd in oddness.items() if odd == max(oddness.values())]


# ---- words ------------------------------------------------------------------------------------------------------


def _classes(known: Mapping[int, RankState], sites: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, state in known.items():
        site = f", at {sites[rank]}" if sites.get(rank) else ""
        ranks[_class_of(state) + site].append(rank)
    return [(words, tuple(found)) for words, found in sorted(ranks.items(), key=lambda item: -len(item[1]))]


def _class_of(state: RankState) -> str:
    """Return a state in words, without times and other differences between ranks of a class."""
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
    """Return an operation in words; groups of the same ranks are numbered, in the order in which all made them."""
    group = operation.group
    if group is None or not operation.call:
        return str(operation)
    alike = [each.key for each in state.record.groups if str(each) == str(group)]
    number = f", number {alike.index(group.key) + 1} of {len(alike)} such" if len(alike) > 1 else ""
    return operation.in_group + number


def _reason(state: RankState, waiting: RankState, site: str) -> str:
    """Return the reason for which a rank has not called its part of the operation of a waiting rank."""
    during = "" if state.phase in (Phase.OTHER, Phase.ENDING) else f" during its {state.phase.name.lower()}"
    where = f" in {state.operation}" if state.operation is not None else during
    if state.condition is Condition.STOPPED:
        reason = f"is stopped by a signal (SIGSTOP or SIGTSTP){where}"
    elif state.condition in (Condition.GONE, Condition.TRACED):
        reason = f"{state.condition.value}{where}"
    elif state.is_ending:
        reason = "has come to the end of its program"
    else:
        where = where if state.operation is not None else f" outside of collectives{during}"
        reason = f"has been{where} for {seconds_in(state):.0f} s" + (f" at {site}" if site else "")
    operation = waiting.operation
    if operation is None or operation.group is None or not operation.call:
        return reason
    group = state.record.group(operation.group.key)
    if group is None:
        return reason
    closed = ", which it has closed" if group.is_closed else ""
    return f"{reason}, after {counted(group.count, 'collective')} of that group{closed}"


def seconds_in(state: RankState) -> float:
    """Return the time for which a rank has been in its operation, or outside of operations, in seconds; local.

    For ranks of other nodes it is as exact as the nodes' clocks agree.
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
        stacks: Stacks as faulthandler writes them, innermost frames first.
        thread: Id of the thread.
    """
    is_wanted = False
    for line in stacks.splitlines():
        if head := _THREAD.match(line):
            is_wanted = int(head["ident"], 16) == thread
        elif is_wanted and (frame := _FRAME.match(line)) and not _LIBRARY.search(frame["file"]):
            return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['function']}"
    return ""
