"""Rows between ranks in every placement, in several chunks, and longer than a chunk."""

import pytest
import torch
from helpers.placements import REAL, new_groups_of

from axonmpi import World
from axonmpi.autograd import fetch_rows
from axonmpi.backends.connection.connection import ChunkSizes
from axonmpi.utils.rows import row_plan

pytestmark = [REAL, pytest.mark.ranks(2, 4)]


@pytest.mark.parametrize("on_a_node", ["1", "2", "3", "4"])
@pytest.mark.parametrize("row", [(3,), (3, 300)])
def test_halos_and_distant_rows(world: World, monkeypatch, on_a_node: str, row: tuple[int, ...]) -> None:
    """Chunks of 4 KiB hold many rows, or less than one, along the first and the last dimension."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", on_a_node)
    with new_groups_of(world, ChunkSizes(4096, 10_000)):
        group = world.new_group(range(world.size))
    sizes = tuple((400 if len(row) == 1 else 20) * rank + 3 for rank in range(group.size))
    whole = torch.arange(sum(sizes) * torch.Size(row).numel(), dtype=torch.float64).view(-1, *row)
    total = len(whole)
    ranges = {
        "halos": [(sum(sizes[:rank]) - 2, sum(sizes[: rank + 1]) + 2) for rank in range(group.size)],
        "reversed": [(total - sum(sizes[: rank + 1]), total - sum(sizes[:rank])) for rank in range(group.size)],
        "all": [(0, total)] * group.size,
        "none": [(0, 0)] * group.size,
    }
    for name, of_ranks in ranges.items():
        plan = row_plan(sizes, tuple(of_ranks), "circular")
        start, stop = of_ranks[group.rank]
        expected = whole[torch.arange(start, stop) % total]
        for dim in (0, len(row)):
            part = whole.split(sizes)[group.rank].movedim(0, dim).contiguous().requires_grad_()
            result = fetch_rows(part, plan, group, dim)
            assert torch.equal(result.movedim(dim, 0), expected), (name, dim)
            result.backward(torch.ones_like(result))
            counts = torch.zeros(total, dtype=torch.float64)
            for low, high in of_ranks:
                counts.index_add_(0, torch.arange(low, high) % total, torch.ones(high - low, dtype=torch.float64))
            own = counts.split(sizes)[group.rank].view(-1, *[1] * len(row)).expand(-1, *row)
            assert torch.equal(part.grad.movedim(dim, 0), own), (name, dim)
    group.close()
