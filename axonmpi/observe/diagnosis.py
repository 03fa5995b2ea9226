"""Who waits for whom in a job, and why: pure functions of where its ranks are.

    ranks 0, 2 in all_reduce, collective 17 of their group ──▶ rank 1, which has called 16 of them ──▶ nobody

An arrow leads from a rank that waits to each rank that has not done its part. Ranks at the end of arrows that wait
for nobody are *behind*: they are what has to be looked at. If every arrow leads on, the ranks wait in a circle.
Ranks in the same place are one class, as in STAT (Arnold et al., Stack Trace Analysis for Large Scale
Debugging, 2007).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..utils.text import counted, name_ranks
from .board import Condition
from .state import RankState

__all__ = ["Diagnosis", "diagnose", "site_in", "with_sites"]

AT_END = "end of program"
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARY = re.compile(rf"{re.escape(_PACKAGE)}|/site-packages/|/lib/python3[.\d]*/|<frozen ")
"""Files of which users did not write the lines."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current t|T)hread 0x(?P<ident>[0-9a-f]+)")


@dataclass(frozen=True)
class Diagnosis:
    """What the ranks of a job wait for.

    Attributes:
        size: Ranks of the job.
        states: Of the ranks that are known, in rank order.
        classes: Where ranks are, in words, with the ranks that are there; the largest class first.
        waits: For each rank that waits the ranks that it waits for.
        behind: Ranks that others wait for, and that wait for nobody; if all wait in a circle, the ranks of it that
            are in another place than most.
        is_circle: Whether every rank that is waited for waits itself.
        unknown: Ranks of the job whose place is not known.
    """

    size: int
    states: Mapping[int, RankState]
    classes: Sequence[tuple[str, tuple[int, ...]]]
    waits: Mapping[int, frozenset[int]]
    behind: tuple[int, ...]
    is_circle: bool
    unknown: tuple[int, ...]

    @property
    def sentences(self) -> list[str]:
        """Who waits for whom and why, a sentence for each rank behind or for the circle."""
        if self.is_circle:
            return [self._circle()]
        return [self._behind(rank) for rank in self.behind]

    def _circle(self) -> str:
        odd = name_ranks(self.behind)
        return f"every rank waits for another one, in a circle, so none goes on; look at {odd} first"

    def _behind(self, rank: int) -> str:
        waiting = [other for other, ranks in self.waits.items() if rank in ranks]
        text = f"{name_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for rank {rank}"
        first = self.states[waiting[0]]
        if first.name and first.name != AT_END:
            text += f" in {first.operation}" + (
                f", collective {first.call} of {first.group_text}" if first.call else ""
            )
        state = self.states.get(rank)
        return f"{text}, and rank {rank} {_reason(state, first)}"


def diagnose(states: Iterable[RankState], size: int) -> Diagnosis:
    """Find out who waits for whom; local.

    Args:
        states: Of the ranks that are known.
        size: Ranks of the job.
    """
    known = {state.rank: state for state in sorted(states, key=lambda state: state.rank)}
    members = _members(known.values())
    waits = {rank: awaited for rank, state in known.items() if (awaited := _awaited(state, known, members, size))}
    targets = {
        rank for waiting, ranks in waits.items() if known[waiting].name != AT_END for rank in ranks
    }  # at the end of its program a rank waits for all others, which may have much to do
    behind = sorted(rank for rank in targets if rank not in waits or known[rank].name == AT_END)
    is_circle = bool(targets) and not behind
    return Diagnosis(
        size=size,
        states=known,
        classes=_classes(known.values()),
        waits=waits,
        behind=tuple(_odd(known, targets) if is_circle else behind),
        is_circle=is_circle,
        unknown=tuple(sorted(set(range(size)) - set(known))),
    )


# ---- arrows -----------------------------------------------------------------------------------------------------


def _members(states: Iterable[RankState]) -> dict[int, dict[int, int]]:
    """Return the world's numbers of the known ranks of each group: by its key, and the number in the group."""
    members: dict[int, dict[int, int]] = defaultdict(dict)
    for state in states:
        for key, number in state.ranks.items():
            members[key][number] = state.rank
    return members


def _awaited(
    state: RankState, known: Mapping[int, RankState], members: Mapping[int, Mapping[int, int]], size: int
) -> frozenset[int]:
    """Return the ranks that a rank waits for."""
    if not state.runs or not state.name:
        return frozenset()
    if state.name == AT_END:
        return frozenset(rank for rank in range(size) if rank not in known or known[rank].name != AT_END)
    of_group = members.get(state.group, {})
    if state.peer is not None:
        peer = of_group.get(state.peer)
        return frozenset() if peer is None or peer == state.rank else frozenset([peer])
    if not state.call:
        return frozenset()
    others = [known[rank] for rank in of_group.values() if rank != state.rank]
    late = [other.rank for other in others if other.counts.get(state.group, 0) < state.call]
    # Where all have come, only one that does not run keeps the others from finishing.
    return frozenset(late or [other.rank for other in others if not other.runs])


def _odd(known: Mapping[int, RankState], ranks: Iterable[int]) -> list[int]:
    """Return those of some ranks that wait in another operation of another group than most; all if none do."""
    places: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        state = known[rank]
        places[state.group, state.name, state.call].append(rank)
    most = max(map(len, places.values()))
    odd = [rank for found in places.values() if len(found) < most for rank in found]
    return odd or sorted(ranks)


# ---- words ------------------------------------------------------------------------------------------------------


def _classes(states: Iterable[RankState]) -> list[tuple[str, tuple[int, ...]]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for state in states:
        ranks[_place(state)].append(state.rank)
    return [(place, tuple(found)) for place, found in sorted(ranks.items(), key=lambda item: -len(item[1]))]


def _place(state: RankState) -> str:
    """Say where a rank is, without what differs between ranks in the same place, such as times."""
    parts = [state.operation or "outside of collectives"]
    if state.call and state.name:
        parts.append(f"collective {state.call} of {state.group_text}")
    elif state.phase and not state.name:
        parts.append(state.phase)
    if state.condition != Condition.LIVES.value:
        parts.append(f"its process {state.condition}")
    return ", ".join(parts) + (f", at {state.site}" if state.site else "")


def _reason(state: RankState | None, waiting: RankState) -> str:
    """Say why a rank has not done its part."""
    if state is None:
        return "is not known on this node"
    called = state.counts.get(waiting.group)
    short = f", after {counted(called, 'collective')} of that group" if waiting.call and called is not None else ""
    during = f" in {state.operation}" if state.name else f" during its {state.phase}" if state.phase else ""
    if state.condition == Condition.STOPPED.value:
        return f"is stopped by a signal (SIGSTOP or SIGTSTP){during}{short}"
    if not state.runs:
        return f"{state.condition}{during}{short}"
    if state.name == AT_END:
        return f"has come to the end of its program{short}"
    if state.name:
        return f"has been in {state.operation} for {state.seconds:.0f} s{short}"
    latest = f"; the last one was {state.latest}" if state.latest else ""
    where = f" at {state.site}" if state.site else ""
    return f"has been outside of collectives for {state.seconds:.0f} s{during}{where}{short}{latest}"


# ---- stacks -----------------------------------------------------------------------------------------------------


def site_in(stacks: str, thread: int) -> str:
    """Return the user's line in the stack of a thread, as "train.py:12 in step"; empty if there is none; local.

    Args:
        stacks: What faulthandler has written, innermost frames first.
        thread: The thread's identity.
    """
    for line in _lines_of(stacks, thread):
        found = _FRAME.match(line)
        if found and not _LIBRARY.search(found["file"]):
            return f"{found['file'].rpartition('/')[2]}:{found['line']} in {found['function']}"
    return ""


def _lines_of(stacks: str, thread: int) -> list[str]:
    """Return the frames of a thread; of all of them where it is not told apart."""
    lines, is_wanted, found = stacks.splitlines(), False, []
    for line in lines:
        if head := _THREAD.match(line):
            is_wanted = int(head["ident"], 16) == thread
        elif is_wanted:
            found.append(line)
    return found


def with_sites(states: Iterable[RankState], sites: Mapping[int, str]) -> list[RankState]:
    """Return the states with the places of the ranks' programs; local."""
    return [replace(state, site=sites.get(state.rank, "")) for state in states]
