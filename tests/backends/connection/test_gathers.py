"""All-gathers whose input lies in unusual memory: symmetric blocks of several sizes, and parts of the output."""

import pytest
import torch
from helpers.placements import REAL

from axonmpi import World

pytestmark = [REAL, pytest.mark.ranks(2, 3)]


@pytest.mark.parametrize("most", [300, 20_000, 600_000])
def test_symmetric_blocks_of_several_sizes(world, most) -> None:
    group = world.default_group
    memory = group.symmetric_empty((most,), torch.float32).fill_(group.rank)
    sizes = [most - 100 * rank for rank in range(group.size)]
    wanted = torch.cat([torch.full((size,), float(rank)) for rank, size in enumerate(sizes)])
    assert torch.equal(group.all_gather(memory[: sizes[group.rank]]), wanted)
    group.barrier()


@pytest.mark.parametrize("ranks_per_node", [1, 8])
@pytest.mark.parametrize("numel", [5, 4000, 200_000])
def test_a_block_that_lies_in_the_output(world: World, monkeypatch, ranks_per_node, numel) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(ranks_per_node))
    group = world.new_group(range(world.size))
    places = [group.rank] if numel > 4000 or ranks_per_node == 1 else range(group.size)
    for place in places:
        output = torch.zeros(group.size * numel)
        own = output[place * numel : (place + 1) * numel].fill_(group.rank + 1)
        group.backend.all_gather_flat(output, own)
        assert torch.equal(output, torch.arange(1.0, group.size + 1).repeat_interleave(numel))
    group.close()
