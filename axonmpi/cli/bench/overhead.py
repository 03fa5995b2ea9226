"""`axonmpi bench overhead`: the time that Python adds to MPI's own all-reduce of one float32.

`axonmpi.all_reduce` checks its arguments, compares the calls of all ranks and sums in rank order; mpi4py's
`Allreduce` on a numpy array does neither. Both take turns on the same ranks. Where ranks outnumber cores, they
take turns at computing, and the difference grows accordingly. Two more variants set the backend's log of operations
at each call: one to the rank's record for `axonmpi why`, one to a log that keeps nothing. Their difference is the
cost of the record.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from ...comm import all_reduce
from ...groups.world import World
from ...launch import start as runtime
from ...record import GroupLog, NoLog
from .harness.benchmark import Benchmark, Figures
from .harness.table import Column, figure, table_lines, text
from .harness.timing import MICROSECONDS, interleave

_CALLS = 400


def _measure(world: World, options: argparse.Namespace) -> Figures:
    mpi = runtime.start_mpi()
    array = np.zeros(1, dtype=np.float32)
    tensor = torch.zeros(1)
    backend = world.default_group.backend
    own_log, no_log = backend.notes, NoLog()

    def all_reduce_with(log: GroupLog | NoLog) -> None:
        backend.notes = log
        all_reduce(tensor)
        backend.notes = own_log

    variants = {
        "mpi4py": lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array),
        "axonmpi": lambda: all_reduce(tensor),
        "noting": lambda: all_reduce_with(own_log),
        "not noting": lambda: all_reduce_with(no_log),
    }
    times = interleave(variants, blocks=options.blocks, calls=_CALLS, unit=MICROSECONDS)
    return {
        "library": mpi.Get_library_version().splitlines()[0].split(",")[0].replace("\t", " "),
        "microseconds": times,
        "added": times["axonmpi"] - times["mpi4py"],
        "notes": times["noting"] - times["not noting"],
    }


_COLUMNS: list[Column] = [
    ("ranks", text("ranks")),
    ("mpi4py", figure("microseconds", "mpi4py", form=".2f")),
    ("axonmpi", figure("microseconds", "axonmpi", form=".2f")),
    ("added", figure("added", form=".2f")),
    ("of it notes", figure("notes", form=".2f")),
]


def _table(results: list[Figures]) -> str:
    title = f"all-reduce of 4 bytes, {results[0]['library']}, {results[0]['cores']} cores; microseconds, medians"
    return "\n".join([title, *table_lines(_COLUMNS, results)])


OVERHEAD = Benchmark(
    "what Python adds to MPI's own all-reduce of 4 bytes", _measure, _table, ranks=(1, 2, 4), uses_torch=False
)
