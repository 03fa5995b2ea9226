#!/usr/bin/env python3
"""What this library itself takes at 16,384 ranks: a pretended world, two real ranks of it on one node.

The communicators are stand-ins (`helpers.pretended`) that claim further nodes of 32 ranks, one of them of 30, and
answer at once as if all ranks made the same calls; their own time and memory is subtracted. It cannot see the
memory and the time of MPI and of the network, nor whether messages would match.

Calls are compared with those of a pretended world of 64 ranks, by turns. The exit code is 0 if all limits hold.
"""

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers.pretended import account, pretended_world
from jobs.job import command_parser, run_on_ranks

import axonmpi as ax
from axonmpi.backends import Sizes
from axonmpi.groups.world import World
from axonmpi.launch.start import start_mpi
from axonmpi.utils.text import aligned

HERE, NODE = 2, 32
"""Ranks that are there, and on each of the other nodes."""
FEW = 64
ELEMENTS = 1 << 18
"""Of 4 bytes: 1 MiB."""
SETUPS = 3
MEGABYTES, GROUP_MEGABYTES = 100.0, 2.0
"""What setting up may take, and what may be kept for a group."""
OPTIONS = {
    "--ranks": {"type": int, "default": 16384, "help": "claimed ranks (default: 16384)"},
    "--calls": {"type": int, "default": 200, "help": "calls of each kind (default: 200)"},
    "--seconds": {"type": float, "default": 2.0, "help": "limit of setting up a world, and a mesh"},
    "--ratio": {"type": float, "default": 1.5, "help": "limit of a call's time to that at 64 ranks"},
}

Call = Callable[[], object]


def node_sizes(ranks: int) -> list[int]:
    """Divide ranks among nodes; the last one has two less, since the first has only those that are there."""
    return [HERE, *[NODE] * ((ranks - 1) // NODE), NODE - HERE]


def mesh_shape(ranks: int) -> dict[str, int]:
    """Return three axes, as of data, pipeline and tensor parallelism."""
    return {"dp": ranks // 128, "pp": 8, "tp": 16} if ranks >= 256 else {"dp": ranks // 16, "pp": 2, "tp": 8}


def calls_of(group: ax.ProcessGroup) -> dict[str, Call]:
    """Return one call of each kind, with tensors that are made before."""
    one, many = torch.ones(1), torch.ones(ELEMENTS)
    sizes = Sizes([ELEMENTS // group.size] * group.size)
    part = torch.ones(sizes[0])
    common = group.node_empty([ELEMENTS], torch.float32)
    return {
        "barrier": group.barrier,
        "all_reduce, 4 B": lambda: group.all_reduce(one),
        "all_reduce, 1 MiB": lambda: group.all_reduce(many),
        "broadcast, 4 B": lambda: group.broadcast(one),
        "broadcast, 1 MiB": lambda: group.broadcast(many),
        "all_gather": lambda: group.all_gather(part),
        "reduce_scatter": lambda: group.reduce_scatter(many),
        "all_gather_into": lambda: group.all_gather_into(common, part, sizes),
        "reduce_scatter_into": lambda: group.reduce_scatter_into(part, [many], sizes),
    }


# ---- measuring --------------------------------------------------------------------------------------------------


@dataclass
class Taken:
    """What something takes, the stand-ins' part subtracted: seconds, and traced bytes at most and afterwards."""

    seconds: float
    peak: int
    kept: int


def taken(action: Call) -> Taken:
    """Measure an action once."""
    tracemalloc.reset_peak()
    seconds, nbytes, traced = account.seconds, account.nbytes, tracemalloc.get_traced_memory()[0]
    began = time.perf_counter()
    action()
    elapsed = time.perf_counter() - began - (account.seconds - seconds)
    standing = account.nbytes - nbytes
    now, peak = tracemalloc.get_traced_memory()
    return Taken(elapsed, peak - traced - standing, now - traced - standing)


def setup_seconds(ranks: int) -> tuple[float, float]:
    """Return how long a world and a mesh take: medians."""
    worlds, meshes = [], []
    for _ in range(SETUPS):
        with pretended_world(node_sizes(ranks)):
            worlds.append(taken(ax.init_process_group).seconds)
            meshes.append(taken(lambda: ax.DeviceMesh(mesh_shape(ranks))).seconds)
            ax.destroy_process_group()
    return statistics.median(worlds), statistics.median(meshes)


def memory(ranks: int) -> tuple[Taken, Taken, Taken]:
    """Return what a world, a mesh, and a group of all ranks that has made a call of each kind take of memory."""
    tracemalloc.start()
    try:
        with pretended_world(node_sizes(ranks)):
            world = taken(ax.init_process_group)
            mesh = taken(lambda: ax.DeviceMesh(mesh_shape(ranks)))
            use(ax.get_world().new_group(range(ranks)))
            group = taken(lambda: use(ax.get_world().new_group(range(ranks))))
            ax.destroy_process_group()
    finally:
        tracemalloc.stop()
    return world, mesh, group


def use(group: ax.ProcessGroup) -> None:
    """Make a call of each kind."""
    for call in calls_of(group).values():
        call()


def call_seconds(worlds: list[World], count: int) -> dict[str, list[float]]:
    """Return how long each kind of call takes in each world: medians of turns."""
    calls = [calls_of(world.default_group) for world in worlds]
    medians = {}
    for name in calls[0]:
        turns = [[taken(of_world[name]).seconds for of_world in calls] for _ in range(count)]
        medians[name] = [statistics.median(column) for column in zip(*turns[count // 5 :], strict=True)]
    return medians


# ---- the table --------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line: figures of few ranks and of many, and the limit of the latter or of their ratio."""

    what: str
    unit: str
    few: float
    many: float
    limit: float
    of_ratio: bool = False

    @property
    def holds(self) -> bool:
        return (self.many / self.few if self.of_ratio else self.many) <= self.limit

    def cells(self) -> list[str]:
        limit = f"{self.limit:g} {'x' if self.of_ratio else self.unit}{'' if self.holds else ' !'}"
        return [self.what, self.unit, f"{self.few:.3g}", f"{self.many:.3g}", f"{self.many / self.few:.2f}", limit]


def measured(ranks: int, count: int, seconds: float, ratio: float) -> list[Row]:
    """Measure everything in pretended worlds of few ranks and of many."""
    both = FEW, ranks
    (few_world, few_mesh), (world, mesh) = map(setup_seconds, both)
    rows = [
        Row("init_process_group", "s", few_world, world, seconds),
        Row("mesh of 3 axes", "s", few_mesh, mesh, seconds),
    ]
    (*few, few_kept), (*many, kept) = map(memory, both)
    for what, small, large in zip(("init_process_group", "mesh of 3 axes"), few, many, strict=True):
        rows += [
            Row(f"{what}, at most", "MB", small.peak / 1e6, large.peak / 1e6, MEGABYTES),
            Row(f"{what}, kept", "MB", small.kept / 1e6, large.kept / 1e6, MEGABYTES),
        ]
    rows.append(Row("a group of all ranks, kept", "MB", few_kept.kept / 1e6, kept.kept / 1e6, GROUP_MEGABYTES))
    worlds = []
    for size in both:
        with pretended_world(node_sizes(size)):
            worlds.append(World.init())
    for what, (small_s, large_s) in call_seconds(worlds, count).items():
        rows.append(Row(what, "us", small_s * 1e6, large_s * 1e6, ratio, of_ratio=True))
    return rows


def main() -> int:
    options = command_parser(__doc__, OPTIONS).parse_args()
    run_on_ranks(HERE)
    rows = measured(options.ranks, options.calls, options.seconds, options.ratio)
    comm = start_mpi().COMM_WORLD
    if comm.rank == 0:
        header = ["", "", f"{FEW} ranks", f"{options.ranks:,} ranks", "ratio", "limit"]
        print("\n".join(aligned([header, *(row.cells() for row in rows)], left=(0, 1))))
    return int(not comm.bcast(all(row.holds for row in rows)))


if __name__ == "__main__":
    sys.exit(main())
