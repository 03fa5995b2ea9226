#!/usr/bin/env python3
"""A soak: rounds of everything on real ranks, each of which must stay as large as it was after the first ones.

    tests/jobs/run soak [ROUNDS] [RANKS]      300 rounds on 2 ranks unless said otherwise

It starts the mpirun that belongs to this Python. 0 is the exit code if all ranks have stayed flat, else 1.
"""

import os
import sys
from itertools import count

from jobs.soak.soak import Usage, most_of, rounds

import axonmpi as ax
from axonmpi.launch.variables import launched_ranks
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

WARM = 30
"""Rounds that may grow: memory is reused from then on."""
KIB = 8192
"""What memory may differ by: one model more would be as much."""


def main(total: int, ranks: int) -> int:
    if launched_ranks() == 1:
        command, variables = mpirun_command(find_mpirun(), ranks)
        os.environ.update(variables, OMP_NUM_THREADS="1")
        os.execv(command[0], [*command, sys.executable, __file__, str(total)])
    world = ax.init_process_group()
    each = rounds(world)
    first = most_of(each, WARM)
    report(world, "first", first)
    last = first
    for done in count(2 * WARM, WARM):
        last = most_of(each, WARM)
        report(world, f"to {done}", last)
        if done >= total:
            break
    grown = ax.all_gather_object(first.growth(last, KIB))
    if world.rank == 0:
        for rank, what in enumerate(grown):
            print(f"rank {rank}: {', '.join(what) or 'flat'}")
    return int(any(grown))


def report(world: ax.World, when: str, most: Usage) -> None:
    """Show what rank 0 has had at most."""
    if world.rank == 0:
        print(f"{when:8} {most}", flush=True)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*numbers, *(300, 2)[len(numbers) :]))
