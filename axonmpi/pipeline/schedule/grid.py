"""What is wrong with a schedule, and where: an error that shows the place (without torch).

    1F1B, rank 1, step 3, stage 1, micro-batch 0: F1.0 is there twice, at step 0 already
             0     1        2        3        4        5        6     7
    rank 0   F0.0  SF0.0>1  F0.1     SF0.1>1  RB0.0<1  RB0.1<1  B0.0  B0.1
    rank 1   F1.0  RF1.0<0  RF1.1<0  [F1.0]   B1.0     SB1.0>0  F1.1  B1.1 …

What is wrong stands in brackets, with a few steps around it; … means that there are more.
"""

from __future__ import annotations

from collections.abc import Mapping

from .actions import Action, Schedule

__all__ = ["ScheduleError", "fault", "grid"]

_AROUND = 4


class ScheduleError(ValueError):
    """A schedule that cannot be run.

    Attributes:
        rank: The rank whose list is wrong; the first one, if several are.
        step: Where in its list, counted from 0; the length of the list for what is missing there.
    """

    def __init__(self, message: str, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step


def fault(schedule: Schedule, rank: int, step: int, action: Action, problem: str) -> ScheduleError:
    """Return the error for an action of one rank; one that is missing there has the step after the last."""
    place = f"{schedule.name}, rank {rank}, step {step}, stage {action.stage}, micro-batch {action.micro_batch}"
    missing = step == len(schedule.actions[rank])
    marks = {(rank, step): f"[no {action}]" if missing else f"[{action}]"}
    return ScheduleError(f"{place}: {problem}\n{grid(schedule, marks, step)}", rank, step)


def grid(schedule: Schedule, marks: Mapping[tuple[int, int], str], center: int) -> str:
    """Draw what each rank does in the steps around one of them.

    Args:
        schedule: What to draw.
        marks: What to write into the cells of (rank, step), in place of the action's short form.
        center: The step in the middle.

    Returns:
        A line of step numbers and a line for each rank.
    """
    steps = range(max(0, center - _AROUND), center + _AROUND + 1)
    table = [[str(step) for step in steps]]
    for rank, actions in enumerate(schedule.actions):
        own = [str(actions[step]) if step < len(actions) else "" for step in steps]
        table.append([marks.get((rank, step), text) for step, text in zip(steps, own, strict=True)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    heads = [" " * len(f"rank {schedule.num_ranks - 1}"), *(f"rank {rank}" for rank in range(schedule.num_ranks))]
    lines = []
    for number, (head, row) in enumerate(zip(heads, table, strict=True)):
        before = "…" if number and steps[0] > 0 else " "
        after = "…" if number and len(schedule.actions[number - 1]) > steps[-1] + 1 else ""
        cells = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{head:{len(heads[0])}} {before} {cells} {after}".rstrip())
    return "\n".join(lines)
