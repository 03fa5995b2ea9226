"""What two ranks on each of two nodes check about them; a script for `test_nodes.py`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import axonmpi as ax

BYTES = 64 << 20


def main() -> None:
    world = ax.init_process_group()
    places(world)
    traffic(world)
    for strategy in ax.ShardingStrategy:
        training(world, strategy)
    ax.barrier()
    print("done")


def places(world: ax.World) -> None:
    seen = ax.all_gather_object((world.node_rank, world.local_rank, world.local_size, world.num_nodes))
    assert seen == [(node, local, 2, 2) for node in (0, 1) for local in (0, 1)], seen
    assert world.default_group.backend.path == "nodes"
    for ranks in ([0, 1], [2, 3]):
        group = world.new_group(ranks)
        assert not group.contains(world.rank) or group.backend.path == "node"


def traffic(world: ax.World) -> None:
    """Each byte of an all-reduce crosses the network once: two nodes cannot do with less in each direction."""
    tensor = torch.full((BYTES // 4,), float(world.rank))
    sent = []
    for repeats in (1, 2):
        ax.barrier()
        before = bytes_of_the_network()
        for _ in range(repeats):
            ax.all_reduce(tensor, ax.ReduceOp.AVERAGE)
        ax.barrier()
        sent = [after - start for after, start in zip(bytes_of_the_network(), before, strict=True)]
    assert (tensor == 1.5).all()
    for count in sent:
        assert 0.99 <= count / 2 / BYTES <= 1.08, count / 2 / BYTES


def bytes_of_the_network() -> tuple[int, int]:
    """Return how many bytes this node has received and sent."""
    with open("/proc/net/dev") as lines:
        numbers = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(numbers[0]), int(numbers[8])


def training(world: ax.World, strategy: ax.ShardingStrategy) -> None:
    """Sharded training with accumulation and clipping equals that of one process on all samples."""
    inputs, targets = (torch.randn(2, 2, 8, size, generator=torch.Generator().manual_seed(size)) for size in (6, 3))
    own = slice(2 * world.rank, 2 * world.rank + 2)
    plain, sharded = model(), ax.FSDP(model(), sharding_strategy=strategy)
    for module, samples in ((plain, slice(None)), (sharded, own)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for x, y in zip(inputs, targets, strict=True):
            for micro_batch in range(2):
                F.mse_loss(module(x[micro_batch, samples]), y[micro_batch, samples]).div(2).backward()
            if module is plain:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            else:
                ax.clip_grad_norm(sharded, 0.05)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(sharded.full_state_dict(), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


if __name__ == "__main__":
    main()
