"""Steps of data parallelism, beside torch on gloo, and an all-reduce of the gradients; for `tests/jobs/run nodes`.

`steps.py BLOCKS` prints medians of seconds as JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import axonmpi as ax
from axonmpi.cli.bench.harness.torch_groups import start_torch

WIDTH, LAYERS, BATCH = 768, 12, 300


def median_seconds(variants: dict[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    """Let the variants take turns; the first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for name, call in [*variants.items()] * (blocks + 1):
        ax.barrier()
        begun = time.perf_counter()
        call()
        ax.barrier()
        taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def step(wrapped: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()

    return run


def measured_steps(blocks: int) -> dict[str, float]:
    """Return the seconds of a step, alone and with others, of its parts, and of an all_reduce; collective."""
    x = torch.randn(BATCH, WIDTH)
    own = model()
    ours, stock = ax.DDP(model()), nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    gradients = torch.zeros(sum(parameter.numel() for parameter in ours.parameters()))
    seconds = median_seconds(
        {
            "forward": lambda: own(x).square().mean(),
            "local": step(own, x),
            "ours": step(ours, x),
            "gloo": step(stock, x),
            "all_reduce": lambda: ax.all_reduce(gradients),
        },
        blocks,
    )
    return {**seconds, "backward": seconds["local"] - seconds["forward"]}


def main() -> None:
    world = ax.init_process_group()
    start_torch(world)
    steps = measured_steps(int(sys.argv[1]))
    if world.is_main:
        print(json.dumps(steps))
    dist.destroy_process_group()
    ax.destroy_process_group()


if __name__ == "__main__":
    main()
