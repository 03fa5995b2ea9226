"""The error for a wrong schedule, with a picture of the actions around the mistake (without torch).

    1F1B, rank 1, step 3, stage 1, micro-batch 0: F1.0 is there twice, at step 0 already
             0     1        2        3        4        5        6     7
    rank 0   F0.0  SF0.0>1  F0.1     SF0.1>1  RB0.0<1  RB0.1<1  B0.0  B0.1
    rank 1   F1.0  RF1.0<0  RF1.1<0  [F1.0]   B1.0     SB1.0>0  F1.1  B1.1 …

The wrong action stands in brackets, with a few steps around it; … means that there are more.
"""

from __future__ import annotations

from collections.abc import Mapping

from .actions import Action, Schedule

_AROUND = 4


class ScheduleError(ValueError):
    """A schedule that cannot be run.

    Attributes:
        rank: The rank whose list is wrong; the first one, if several are.
        step: The index in its list; the length of the list for an action that is missing there.
    """

    def __init__(self, message: str, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step


def fault(schedule: Schedule, wrong: Mapping[tuple[int, int], Action], problem: str) -> ScheduleError:
    """Return the error for a schedule.

    Args:
        schedule: The schedule.
        wrong: The actions that are wrong, by rank and step, the first one in the middle of the picture; one that
            is missing has the step after the last.
        problem: The end of the message's first line.
    """
    (rank, step), action = next(iter(wrong.items()))
    where = f"{schedule.name}, rank {rank}, step {step}, stage {action.stage}, micro-batch {action.micro_batch}"
    missing = step == len(schedule.actions[rank])
    marks = {cell: f"[no {action}]" if missing else f"[{action}]" for cell, action in wrong.items()}
    return ScheduleError(f"{where}: {problem}\n{_grid(schedule, marks, step)}", rank, step)


def _grid(schedule: Schedule, marks: Mapping[tuple[int, int], str], center: int) -> str:
    """Draw the steps around one of them: a line of their numbers and one for each rank, with marked cells."""
    steps = range(max(0, center - _AROUND), center + _AROUND + 1)
    table = [["", " ", *map(str, steps), ""]]
    for rank, actions in enumerate(schedule.actions):
        cells = [marks.get((rank, step), str(actions[step]) if step < len(actions) else "") for step in steps]
        more = "…" if len(actions) > steps.stop else ""
        table.append([f"rank {rank}", "…" if steps.start else " ", *cells, more])
    head, _, *widths, _ = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, left, *texts, right in table:
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
        lines.append(f"{name:{head}} {left} {'  '.join(cells)} {right}".rstrip())
    return "\n".join(lines)
