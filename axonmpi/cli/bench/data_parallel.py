"""A step of data parallel training, with whole and with sharded parameters: ours, and torch's on gloo and on ours.

The model is a multilayer perceptron of 12.6 million parameters with a batch of 64 a rank.

ddp     Four copies take turns at forward and backward: one without data parallelism (all ranks compute, nobody
        communicates), one wrapped by axonmpi, two by `torch.nn.parallel.DistributedDataParallel`, on gloo and on
        axonmpi's backend of torch.distributed. Overhead is a wrapped step's time less the local step's.

fsdp    Each layer is a unit, and the steps are AdamW's, too; `--batch` changes the batch. Time: all variants take
        turns in one job. Memory: each variant by itself, in the same job before that; the largest memory of the
        node's processes beyond their memory before it was built, with shared memory in equal shares.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import all_reduce_sum
from ...ddp import DistributedDataParallel
from ...fsdp import FullyShardedDataParallel, ShardingStrategy
from ...fsdp.memory import PeakMemory, process_memory
from ...groups.world import World
from ...utils.text import aligned
from .harness.timing import give_back, interleave, start_gloo, stock_groups

BATCH = 64
_WIDTHS = (1024, 2048, 2048, 2048, 1024)
_DDP_STEPS_PER_BLOCK = 3
_FSDP_STEPS_PER_BLOCK = 2
_MEMORY_STEPS = 3

Step = Callable[[], None]


def measure_ddp(world: World, blocks: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; the figures are in milliseconds."""
    start_gloo(world)
    seconds = _ddp_seconds(batch_of(world, BATCH), blocks)
    dist.destroy_process_group()
    milliseconds = {name: value * 1e3 for name, value in seconds.items()}
    return {
        "ranks": world.size,
        "parameters": sum(p.numel() for p in build_model().parameters()),
        "machine": platform.machine(),
        "milliseconds": milliseconds,
        "overhead": {name: time - milliseconds["local"] for name, time in milliseconds.items() if name != "local"},
    }


def _ddp_seconds(batch: Tensor, blocks: int) -> dict[str, float]:
    """Measure the steps. Torch's model is gone afterwards: freed after gloo's group it would wait for it for ever.

    Its C++ part would hold the last reference, and join a thread of gloo that needs the interpreter lock.
    """
    steps = {
        "local": step_of(build_model(), batch),
        "axonmpi": step_of(DistributedDataParallel(build_model()), batch),
        **{name: step_of(torch_ddp(group), batch) for name, group in stock_groups().items()},
    }
    return interleave(steps, blocks=blocks, calls=_DDP_STEPS_PER_BLOCK)


def ddp_table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    title = f"DDP, {results[0]['parameters'] / 1e6:.1f} M parameters, batch {BATCH} a rank; ms a step, medians"
    rows = [["ranks", *results[0]["milliseconds"], "|", "overhead:", *results[0]["overhead"], "gloo / axonmpi"]]
    for result in results:
        ours, stock = result["overhead"]["axonmpi"], result["overhead"]["torch on gloo"]
        times = [f"{time:.1f}" for time in result["milliseconds"].values()]
        more = [f"{time:.1f}" for time in result["overhead"].values()]
        ratio = f"{stock / ours:.1f}" if ours > 0 else "no overhead"
        rows.append([str(result["ranks"]), *times, "|", "", *more, ratio])
    return "\n".join([title, *aligned(rows)])


def measure_fsdp(world: World, blocks: int, samples_per_rank: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; times in milliseconds, memory in bytes."""
    start_gloo(world)
    batch = batch_of(world, samples_per_rank)
    wrappers: dict[str, Callable[[nn.Sequential], nn.Module]] = {
        "local": lambda model: model,
        "ddp": DistributedDataParallel,
        "fsdp": lambda model: FullyShardedDataParallel(model, units=nn.Linear),
        "fsdp bfloat16": lambda model: FullyShardedDataParallel(model, units=nn.Linear, mixed_precision=True),
        **{name: partial(torch_fsdp, group=group) for name, group in stock_groups().items()},
    }

    def make(name: str) -> Step:
        model = wrappers[name](build_model())
        return step_of(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4))

    memory = {name: _peak_memory(partial(make, name)) for name in wrappers}
    seconds = interleave({name: make(name) for name in wrappers}, blocks=blocks, calls=_FSDP_STEPS_PER_BLOCK)
    estimates = {
        name: FullyShardedDataParallel(build_model(), units=nn.Linear, sharding_strategy=strategy).memory_estimate()
        for name, strategy in {"ddp": ShardingStrategy.NO_SHARD, "fsdp": ShardingStrategy.FULL_SHARD}.items()
    }
    dist.destroy_process_group()
    return {
        "ranks": world.size,
        "parameters": estimates["ddp"].total_params,
        "batch": samples_per_rank,
        "milliseconds": {name: value * 1e3 for name, value in seconds.items()},
        "memory": memory,
        "theory": {name: estimate.total_memory_bytes * world.size for name, estimate in estimates.items()},
    }


def fsdp_table(results: list[dict[str, Any]]) -> str:
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


# ---- steps ------------------------------------------------------------------------------------------------------


def build_model() -> nn.Sequential:
    """Return the multilayer perceptron."""
    layers: list[nn.Module] = []
    for before, after in pairwise(_WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch_of(world: World, samples: int) -> Tensor:
    """Return this rank's inputs."""
    return torch.randn(samples, _WIDTHS[0], generator=torch.Generator().manual_seed(world.rank))


def step_of(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Return what does a step: forward, backward, and the optimizer's if there is one."""

    def step() -> None:
        model.zero_grad()
        model(batch).float().square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def torch_ddp(group: dist.ProcessGroup) -> nn.Module:
    """Return a model under torch's DistributedDataParallel; collective over a group of all ranks."""
    return nn.parallel.DistributedDataParallel(build_model(), process_group=group, gradient_as_bucket_view=True)


def torch_fsdp(model: nn.Sequential, group: dist.ProcessGroup) -> nn.Module:
    """Shard a model by torch's FSDP2, a unit for each layer; collective over a group of all ranks."""
    # These take a second to import, which the other benchmarks need not spend.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _peak_memory(make: Callable[[], Step]) -> int:
    """Return the largest memory of a variant in a few steps, on all ranks of the node together; collective."""
    give_back()
    before = process_memory()[0]
    step = make()
    with PeakMemory() as peak:
        for _ in range(_MEMORY_STEPS):
            step()
    most = torch.tensor([peak.most - before])
    all_reduce_sum(most)
    del step
    give_back()
    return int(most)
