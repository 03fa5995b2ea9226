"""Hundreds of collectives of all kinds in groups that overlap: every result is right, and no memory is lost."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from helpers.collective_checks import CollectiveChecks
from helpers.numpy_reference import reductions
from helpers.placements import REAL, Places, limits, new_groups_of

from axonmpi import World
from axonmpi.backends.connection.connection import ChunkSizes

STEPS = 12
"""Of each run: what is remembered about calls after the first ones serves the others too."""
MOST_RUNS = 20
GROWTH_PER_STEP = 20 * 4096
"""Bytes; a step is twenty collectives."""
KINDS = ("ordinary", "view", "scattered")
DTYPES = (torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = (0, 1, 3, 14, 28, 29, 100, 1000, 5000, 20_000)


def make_checks(world: World) -> dict[tuple[int, str, bool], CollectiveChecks]:
    """Make groups, some of which this rank is in; by number, place of the tensors, and whether asynchronous."""
    size = world.size
    sets = [range(size), range(size)[::-1], range(size - size // 2), range(size // 2, size), [0, size - 1]]
    groups = []
    for number, ranks in enumerate(sets):  # in every other one data of a few pages is several chunks
        with new_groups_of(world, None if number % 2 else ChunkSizes(chunk=1 << 14)):
            groups.append(world.new_group(ranks))
    return {
        (number, kind, asynchronous): CollectiveChecks(
            group, asynchronous=asynchronous, label=kind, put=Places(group, kind, 8 * max(SIZES)).put
        )
        for number, group in enumerate(groups)
        if group.contains(world.rank)
        for kind in KINDS
        for asynchronous in (False, True)
    }


def resident() -> tuple[int, int]:
    """Bytes of memory that this process has for itself, and that it shares."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":") for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return int(sizes["RssAnon"].split()[0]) << 10, int(sizes["RssShmem"].split()[0]) << 10


@REAL
@pytest.mark.ranks(2, 4)
def test_hundreds_of_collectives(world, near_caches, seed) -> None:
    large = limits(world.size).medium // 4 + 100
    checks = make_checks(world)
    hurry = random.Random(world.rank)
    grown = []
    before = resident()
    # Views are kept up to a limit, and an allocator may keep more than before: neither goes on. What is lost is
    # lost in every run.
    for _ in range(MOST_RUNS):
        drawn = random.Random(seed)  # in step on all ranks
        for _ in range(STEPS):
            for _ in range(hurry.randrange(3)):
                os.sched_yield()
            dtype, count, kind = drawn.choice(DTYPES), drawn.choice(SIZES), drawn.choice(KINDS)
            count = large if kind == "ordinary" and count > 1000 else count
            op, which = drawn.choice(reductions(dtype)), drawn.randrange(world.size)
            chosen = checks.get((drawn.randrange(5), kind, drawn.random() < 0.2))
            if chosen is not None:
                for _ in range(4):  # so that the next run has the same places in memory
                    chosen.every_symmetric_operation(dtype, (count,), op, which)
                chosen.barrier()
        for each in checks.values():
            each.finish()
        now = resident()
        grown.append([later - earlier for earlier, later in zip(before, now, strict=True)])
        before = now
        if not any(world.default_group.all_gather_object(max(grown[-1]) > GROWTH_PER_STEP * STEPS)):
            return
    pytest.fail(f"memory (own, shared) grows in each run: {grown}")
