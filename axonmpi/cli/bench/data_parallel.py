"""`axonmpi bench ddp` and `fsdp`: cases, columns and options.

The model is a multilayer perceptron of 12.6 million parameters with a batch of 64 a rank.

ddp     Four copies take turns at forward and backward: one without data parallelism (all ranks compute, none
        communicates), one wrapped by axonmpi, two by `torch.nn.parallel.DistributedDataParallel`, on gloo and on
        axonmpi's backend of torch.distributed. Overhead is a wrapped step's time less the local step's.

fsdp    Each layer is a unit, and a step includes AdamW's; `--batch` changes the batch. Time: all variants take
        turns in one job. Memory: each variant by itself, in the same job before that; the largest memory of the
        node's processes beyond their memory before it was built, with shared memory in equal shares.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import all_reduce_sum
from ...ddp import DistributedDataParallel
from ...fsdp import FullyShardedDataParallel, ShardingStrategy
from ...groups.world import World
from ...utils.process_memory import PeakMemory, process_memory
from .harness.benchmark import Benchmark, Figures
from .harness.options import TRACE, number
from .harness.table import BAR, Column, figure, gain, ratio, table_lines, text
from .harness.timing import MILLISECONDS, interleave, release_memory
from .harness.torch_groups import ON_AXONMPI, ON_GLOO, torch_fsdp, torch_groups

BATCH = 64
_WIDTHS = (1024, 2048, 2048, 2048, 1024)
_DDP_STEPS_PER_BLOCK = 3
_FSDP_STEPS_PER_BLOCK = 2
_MEMORY_STEPS = 3
_MEBIBYTES = 2**-20

Step = Callable[[], None]


# ---- ddp --------------------------------------------------------------------------------------------------------


def _measure_ddp(world: World, options: argparse.Namespace) -> Figures:
    batch = batch_of(world, BATCH)
    steps = {
        "local": step_of(build_model(), batch),
        "axonmpi": step_of(DistributedDataParallel(build_model()), batch),
        **{name: step_of(torch_ddp(group), batch) for name, group in torch_groups().items()},
    }
    times = interleave(steps, blocks=options.blocks, calls=_DDP_STEPS_PER_BLOCK, unit=MILLISECONDS)
    return {
        "parameters": sum(p.numel() for p in build_model().parameters()),
        "machine": platform.machine(),
        "milliseconds": times,
        "overhead": {name: time - times["local"] for name, time in times.items() if name != "local"},
    }


_WRAPPED = ("axonmpi", ON_GLOO, ON_AXONMPI)
_DDP_COLUMNS: list[Column] = [
    ("ranks", text("ranks")),
    *((name, figure("milliseconds", name)) for name in ("local", *_WRAPPED)),
    BAR,
    ("overhead:", lambda result: ""),
    *((name, figure("overhead", name)) for name in _WRAPPED),
    ("gloo / axonmpi", lambda result: gain(result["overhead"][ON_GLOO], result["overhead"]["axonmpi"])),
]


def _ddp_table(results: list[Figures]) -> str:
    title = f"DDP, {results[0]['parameters'] / 1e6:.1f} M parameters, batch {BATCH} a rank; ms a step, medians"
    return "\n".join([title, *table_lines(_DDP_COLUMNS, results)])


DDP = Benchmark(
    "step overhead of data parallelism, ours and torch's on gloo and on ours",
    _measure_ddp,
    _ddp_table,
    options={"--trace": TRACE},
)


# ---- fsdp -------------------------------------------------------------------------------------------------------


def _measure_fsdp(world: World, options: argparse.Namespace) -> Figures:
    batch = batch_of(world, options.batch)
    wrappers: dict[str, Callable[[nn.Sequential], nn.Module]] = {
        "local": lambda model: model,
        "ddp": DistributedDataParallel,
        "fsdp": lambda model: FullyShardedDataParallel(model, units=nn.Linear),
        "fsdp bfloat16": lambda model: FullyShardedDataParallel(model, units=nn.Linear, mixed_precision=True),
        **{name: partial(torch_fsdp, group=group) for name, group in torch_groups().items()},
    }

    def make(name: str) -> Step:
        model = wrappers[name](build_model())
        return step_of(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4))

    # Memory first: the models of all variants, which are timed in turns, exist at once.
    memory = {name: _peak_memory(partial(make, name)) for name in wrappers}
    steps = {name: make(name) for name in wrappers}
    times = interleave(steps, blocks=options.blocks, calls=_FSDP_STEPS_PER_BLOCK, unit=MILLISECONDS)

    estimates = {
        name: FullyShardedDataParallel(build_model(), units=nn.Linear, sharding_strategy=strategy).memory_estimate()
        for name, strategy in {"ddp": ShardingStrategy.NO_SHARD, "fsdp": ShardingStrategy.FULL_SHARD}.items()
    }
    return {
        "parameters": estimates["ddp"].total_params,
        "batch": options.batch,
        "milliseconds": times,
        "memory": memory,
        "theory": {name: estimate.total_memory_bytes * world.size for name, estimate in estimates.items()},
    }


def _peak_memory(make: Callable[[], Step]) -> int:
    """Return the largest memory of a variant in a few steps, on all ranks of the node together; collective."""
    release_memory()
    before = process_memory()[0]
    step = make()
    with PeakMemory() as peak:
        for _ in range(_MEMORY_STEPS):
            step()
    most = torch.tensor([peak.most - before])
    all_reduce_sum(most)
    del step
    release_memory()
    return int(most)


def fsdp_table(results: list[Figures]) -> str:
    """Format times, then memory, of several numbers of ranks."""
    first = results[0]
    names = list(first["milliseconds"])
    times = [
        ("ms a step", lambda result: ""),
        ("ranks", text("ranks")),
        *((name, figure("milliseconds", name)) for name in names),
        BAR,
        ("gloo / fsdp", ratio(ON_GLOO, "fsdp", "milliseconds")),
        ("ddp / fsdp", ratio("ddp", "fsdp", "milliseconds")),
    ]
    memory = [
        ("MiB of a node", lambda result: ""),
        ("ranks", text("ranks")),
        *((name, figure("memory", name, form=".0f", scale=_MEBIBYTES)) for name in names),
        BAR,
        ("theory: ddp", figure("theory", "ddp", form=".0f", scale=_MEBIBYTES)),
        ("fsdp", figure("theory", "fsdp", form=".0f", scale=_MEBIBYTES)),
    ]
    title = f"{first['parameters'] / 1e6:.1f} M parameters, batch {first['batch']} a rank, AdamW"
    note = "memory at most; theory: parameters, gradients and AdamW's state alone"
    return "\n".join([title, *table_lines(times, results), "", *table_lines(memory, results), note])


FSDP = Benchmark(
    "a step of fully sharded training: ours, torch's on gloo, and data parallelism; time and memory",
    _measure_fsdp,
    fsdp_table,
    options={"--batch": number("samples of a step on each rank", BATCH), "--trace": TRACE},
)


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
    """Return a function that runs a step: forward, backward, and the optimizer's if there is one."""

    def step() -> None:
        model.zero_grad()
        model(batch).float().square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def torch_ddp(group: dist.ProcessGroup) -> nn.Module:
    """Return a model under torch's DistributedDataParallel; collective over a group of all ranks."""
    return nn.parallel.DistributedDataParallel(build_model(), process_group=group, gradient_as_bucket_view=True)
