"""A step of fully sharded training: ours, torch's on gloo, and our data parallelism.

The model is a multilayer perceptron of 12.6 million parameters, each layer a unit, with a batch of 64 a rank
(`--batch` changes that) and AdamW. Time: all variants take turns in one job. Memory: each variant for itself, in
the same job before that; the most that the node's processes have beyond what they had before it was built, memory
in common in equal shares.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import all_reduce_sum, barrier
from ...ddp import DistributedDataParallel
from ...fsdp import FullyShardedDataParallel, ShardingStrategy
from ...fsdp.memory import PeakMemory, process_memory
from ...groups.world import World
from ...utils.text import aligned
from .ddp import WIDTHS, build_model
from .gloo import start_gloo
from .timing import interleave

__all__ = ["BATCH", "measure", "table"]

BATCH = 64
STEPS_PER_BLOCK = 2
_MEMORY_STEPS = 3

Step = Callable[[], None]


def measure(world: World, blocks: int, samples_per_rank: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; times in milliseconds, memory in bytes."""
    start_gloo(world)
    batch = torch.randn(samples_per_rank, WIDTHS[0], generator=torch.Generator().manual_seed(world.rank))
    variants: dict[str, Callable[[nn.Sequential], Step]] = {
        "local": lambda model: _step(model, batch),
        "ddp": lambda model: _step(DistributedDataParallel(model), batch),
        "fsdp": lambda model: _step(FullyShardedDataParallel(model, units=nn.Linear), batch),
        "fsdp bfloat16": lambda model: _step(
            FullyShardedDataParallel(model, units=nn.Linear, mixed_precision=True), batch
        ),
        "torch on gloo": lambda model: _step(_torch_fsdp(model, world), batch),
    }
    memory = {name: _peak_memory(make) for name, make in variants.items()}
    seconds = interleave(
        {name: make(build_model()) for name, make in variants.items()}, blocks=blocks, calls=STEPS_PER_BLOCK
    )
    parameters = sum(p.numel() for p in build_model().parameters())
    theory = {
        name: FullyShardedDataParallel(build_model(), units=nn.Linear, sharding_strategy=strategy)
        .memory_estimate()
        .total_memory_bytes
        * world.size
        for name, strategy in {"ddp": ShardingStrategy.NO_SHARD, "fsdp": ShardingStrategy.FULL_SHARD}.items()
    }
    dist.destroy_process_group()
    return {
        "ranks": world.size,
        "parameters": parameters,
        "batch": samples_per_rank,
        "milliseconds": {name: value * 1e3 for name, value in seconds.items()},
        "memory": memory,
        "theory": theory,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    title = f"{results[0]['parameters'] / 1e6:.1f} M parameters, batch {results[0]['batch']} a rank, AdamW"
    names = list(results[0]["milliseconds"])
    times = [["ms a step", "ranks", *names, "|", "gloo / fsdp", "ddp / fsdp"]]
    memory = [["MiB of a node", "ranks", *names, "|", "theory: ddp", "fsdp"]]
    for result in results:
        ranks, taken = str(result["ranks"]), result["milliseconds"]
        ratios = (f"{taken[name] / taken['fsdp']:.2f}" for name in ("torch on gloo", "ddp"))
        times.append(["", ranks, *(f"{value:.1f}" for value in taken.values()), "|", *ratios])
        numbers = [f"{value / 2**20:.0f}" for value in [*result["memory"].values(), *result["theory"].values()]]
        memory.append(["", ranks, *numbers[: len(names)], "|", *numbers[len(names) :]])
    note = "memory at most; theory: parameters, gradients and AdamW's state alone"
    return "\n".join([title, *aligned(times), "", *aligned(memory), note])


def _torch_fsdp(model: nn.Sequential, world: World) -> nn.Module:
    # These take a second to import, which is none of the other benchmarks' business.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, batch: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()

    return step


def _peak_memory(make: Callable[[nn.Sequential], Step]) -> int:
    """Return what a variant takes at most in a few steps, once it is built, on all ranks of the node together."""
    _give_back()
    before = process_memory()[0]
    step = make(build_model())
    with PeakMemory() as peak:
        for _ in range(_MEMORY_STEPS):
            step()
    most = torch.tensor([peak.most - before])
    all_reduce_sum(most)
    del step
    _give_back()
    return int(most)


def _give_back() -> None:
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    barrier()
