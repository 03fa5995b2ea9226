#!/usr/bin/env python3
"""A soak: everything made, used and dropped again on real ranks, round after round.

Each rank must stay as large as it was after the first rounds. The exit code is 0 if all ranks have stayed flat.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from jobs.job import command_parser, run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax

WARM = 30
"""Rounds that may grow: memory is reused from then on."""
KIB = 8192
"""What memory may differ by: one model more would be as much."""
WIDTH = 512
"""Models have some MiB, so that one which is kept shows."""
_looking = threading.RLock()
"""One rank at a time looks: mock ranks have one collector, which ignores a second call, and one list of files."""


@dataclass(frozen=True)
class Usage:
    """What a process has at the moment."""

    resident_kib: int
    mappings: int
    descriptors: int
    threads: int

    def growth(self, later: Usage, kib: int) -> list[str]:
        """Say what the process has more of later; `kib` is what allocators may account for."""
        allowed = Usage(kib, mappings=8, descriptors=0, threads=0)
        more = {name: getattr(later, name) - getattr(self, name) for name in vars(allowed)}
        return [f"{count} {name} more" for name, count in more.items() if count > getattr(allowed, name)]

    def __str__(self) -> str:
        return (
            f"{self.resident_kib / 1024:8.1f} MiB {self.mappings:5} mappings {self.descriptors:4} descriptors "
            f"{self.threads:3} threads"
        )


def collect() -> None:
    """Collect garbage."""
    with _looking:
        gc.collect()


def descriptors() -> int:
    """Count open files but for those of /proc, which the watchdog opens for a moment at any time."""
    files = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has been closed meanwhile
            files.append(os.readlink(file))
    return sum(not file.startswith("/proc/") for file in files)


def usage() -> Usage:
    """Look at this process; local."""
    with _looking:
        collect()
        process = Path("/proc/self")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Usage(
            int(status["VmRSS"].split()[0]),
            len((process / "maps").read_text().splitlines()),
            descriptors(),
            threading.active_count(),
        )


def rounds(world: ax.World) -> Iterator[Usage]:
    """Do a round at a time; collective. Yield what the process has after each."""
    number = 0
    while True:
        for step in (collectives, groups, data_parallel, fully_sharded, pipelined, divided):
            step(world, number)
        number += 1
        world.barrier()
        seen = usage()
        world.barrier()
        yield seen


def most_of(seen: Iterator[Usage], count: int) -> Usage:
    """Do so many rounds; return the most that the process had after any of them."""
    each = list(islice(seen, count))
    return Usage(*(max(getattr(usage, name) for usage in each) for name in vars(each[0])))


# ---- what a round does ----------------------------------------------------------------------------------------


def collectives(world: ax.World, number: int) -> None:
    """All-reduces of a thousand sizes, more than plans are kept for; ordinary and symmetric."""
    turn = number % 15
    for step in range(72):
        size = 1 + 37 * (turn * 72 + step)
        ax.all_reduce(torch.ones(size))
        ax.all_reduce(torch.ones(size, 2, dtype=torch.float64), async_op=True).wait()
    for size in (1000, 100_000, 400_000):
        ax.all_reduce(torch.ones(4 * size + turn))
        ax.all_reduce(ax.symmetric_empty((size + turn,), torch.float32).zero_())
    ax.broadcast_object({"round": number})
    ax.node_shared(lambda: torch.ones(1_000_000 + turn))
    ax.all_gather(torch.ones(world.rank + number % 5))


def groups(world: ax.World, number: int) -> None:
    """Groups and meshes that are closed, and a world of its own."""
    group = world.new_group(range(world.size))
    group.all_reduce(torch.ones(10_000))
    group.all_reduce(torch.ones(10), async_op=True).wait()
    group.private().barrier()
    group.close()
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2} if world.size % 2 == 0 else {"dp": world.size})
    ax.barrier(mesh.group("dp"))
    mesh.close()
    half = world.partition([[rank] for rank in range(world.size)])
    half.barrier()
    half.close()
    if number % 5 == 0 and world.default_group.backend.name == "mpi":
        other = ax.World.init()
        other.default_group.all_reduce(torch.ones(10_000))
        other.close()


def data_parallel(world: ax.World, number: int) -> None:
    """Models that are wrapped, trained and dropped."""
    trained(ax.DDP(model(), find_unused_parameters=number % 2 == 0, bucket_cap_mb=1))


def fully_sharded(world: ax.World, number: int) -> None:
    """The same, sharded."""
    trained(ax.FSDP(model(), sharding_strategy=list(ax.ShardingStrategy)[number % 2]))
    ax.FSDP(model())  # never used


def pipelined(world: ax.World, number: int) -> None:
    """A pipeline with mailboxes between its stages."""
    schedule, layers = list(ax.PipelineSchedule)[number % 2], [layer() for _ in range(world.size)]
    trained(ax.Pipeline.from_modules(layers, schedule=schedule, num_microbatches=2, loss_fn=F.mse_loss))


def divided(world: ax.World, number: int) -> None:
    """Layers whose features are divided over the ranks."""
    first, last = ax.ColumnParallelLinear(WIDTH, 2 * WIDTH), ax.RowParallelLinear(2 * WIDTH, WIDTH)
    trained(nn.Sequential(first, nn.GELU(), last))


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())


def model() -> nn.Module:
    return nn.Sequential(layer(), layer(), nn.Linear(WIDTH, WIDTH))


def batch() -> Tensor:
    return torch.ones(4, WIDTH)


def trained(module: nn.Module | ax.Pipeline) -> None:
    """Make two steps."""
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        if isinstance(module, ax.Pipeline):
            module.train_step(batch(), batch())
        else:
            F.mse_loss(module(batch()), batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- the command ------------------------------------------------------------------------------------------------


def soak(total: int) -> bool:
    """Return True if a rank has grown."""
    world = ax.init_process_group()
    each = rounds(world)
    first = last = most_of(each, WARM)
    report("first", first)
    for done in count(2 * WARM, WARM):
        last = most_of(each, WARM)
        report(f"to {done}", last)
        if done >= total:
            break
    grown = ax.all_gather_object(first.growth(last, KIB))
    if world.is_main:
        for rank, what in enumerate(grown):
            print(f"rank {rank}: {', '.join(what) or 'flat'}")
    return any(grown)


def report(when: str, most: Usage) -> None:
    """Show what rank 0 has had at most."""
    if ax.is_main_process():
        print(f"{when:8} {most}", flush=True)


if __name__ == "__main__":
    sizes = {
        "--rounds": {"type": int, "default": 300, "help": "default: 300, at least 60"},
        "--ranks": {"type": int, "default": 2, "help": "default: 2"},
    }
    options = command_parser(__doc__, sizes).parse_args()
    run_on_ranks(options.ranks)
    sys.exit(soak(options.rounds))
