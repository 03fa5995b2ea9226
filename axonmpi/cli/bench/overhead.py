"""What Python adds to MPI's own all-reduce of one float32.

`axonmpi.all_reduce` checks its arguments, compares the calls of all ranks and sums in rank order; mpi4py's
`Allreduce` on a numpy array does none of that. Both take turns on the same ranks. Where ranks outnumber cores, they
take turns at computing, and the difference grows accordingly. A third contender does not note its operations in the
rank's page: the difference to one that sets the same attribute, but notes them, is what the notes cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...comm import all_reduce
from ...groups.world import World
from ...launch import start as runtime
from ...launch.page import GroupLog, NoLog
from ...utils.text import aligned
from .harness.timing import count_cores, interleave

CALLS = 400


def measure(world: World, blocks: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; the figures are in microseconds."""
    mpi = runtime.start_mpi()
    array = np.zeros(1, dtype=np.float32)
    tensor = torch.zeros(1)
    backend = world.default_group.backend
    notes, nothing = backend.notes, NoLog()

    def with_notes(taken: GroupLog | NoLog) -> None:
        backend.notes = taken
        all_reduce(tensor)
        backend.notes = notes

    seconds = interleave(
        {
            "mpi4py": lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array),
            "axonmpi": lambda: all_reduce(tensor),
            "noting": lambda: with_notes(notes),
            "not noting": lambda: with_notes(nothing),
        },
        blocks=blocks,
        calls=CALLS,
    )
    microseconds = {name: value * 1e6 for name, value in seconds.items()}
    return {
        "ranks": world.size,
        "cores": count_cores(world),
        "library": mpi.Get_library_version().splitlines()[0].split(",")[0].replace("\t", " "),
        "microseconds": microseconds,
        "added": microseconds["axonmpi"] - microseconds["mpi4py"],
        "notes": microseconds["noting"] - microseconds["not noting"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    title = f"all-reduce of 4 bytes, {results[0]['library']}, {results[0]['cores']} cores; microseconds, medians"
    rows = [["ranks", "mpi4py", "axonmpi", "added", "of it notes"]]
    for result in results:
        measured = result["microseconds"]
        times = measured["mpi4py"], measured["axonmpi"], result["added"], result["notes"]
        rows.append([str(result["ranks"]), *(f"{time:.2f}" for time in times)])
    return "\n".join([title, *aligned(rows)])
