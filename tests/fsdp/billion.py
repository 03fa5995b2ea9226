"""One step of a model of a billion parameters that no rank ever holds: `mpirun -n 4 python tests/fsdp/billion.py`.

The model is built on the meta device, initialised unit by unit in memory that the ranks have in common, and makes
one step of AdamW on a small batch. Prints the parameters, the time of each part, and the most memory that all ranks
of the node had together, beside what parameters, gradients and AdamW's state take in theory. Fails above `--limit`.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.utils.process_memory import PeakMemory, process_memory

GIB = 1 << 30


def block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        *(nn.Linear(width, 6 * width, bias=False), nn.SiLU()),
        nn.Linear(6 * width, width, bias=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--limit", type=float, default=22.0)
    options = parser.parse_args()
    world = ax.init_process_group()
    with torch.device("meta"):
        blocks = [block(options.width) for _ in range(options.layers)]
        model = nn.Sequential(nn.Embedding(256, options.width), *blocks, nn.Linear(options.width, 256))
    before = process_memory()[0]
    with PeakMemory() as peak:
        begun = time.perf_counter()
        fsdp = ax.FSDP(model, units=nn.Sequential)
        optimizer = torch.optim.AdamW(fsdp.parameters(), fused=True)
        built = time.perf_counter()
        tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(world.rank))
        loss = F.cross_entropy(fsdp(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        ended = time.perf_counter()
    memory = torch.tensor([peak.most, before])
    ax.all_reduce_sum(memory)
    most, empty = memory.tolist()
    stats = fsdp.memory_stats()
    theory = stats.total_memory_bytes * world.size / GIB
    if world.rank == 0:
        print(
            f"{stats.total_params:,} parameters on {world.size} ranks: built in {built - begun:.1f} s, one step in "
            f"{ended - built:.1f} s; at most {most / GIB:.2f} GiB on the node, {empty / GIB:.2f} of them before; "
            f"{theory:.2f} in theory; loss {loss.item():.3f}",
            flush=True,
        )
    ax.destroy_process_group()
    if most > options.limit * GIB:
        raise SystemExit(f"expected at most {options.limit} GiB, took {most / GIB:.2f}")


main()
