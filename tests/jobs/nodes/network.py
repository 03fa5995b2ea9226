"""What the network between nodes costs; a script for `tests/jobs/run nodes`.

Prints the time of an all_reduce of 64 MiB beside the time that its bytes take at the given bandwidth (`--gbit`),
and how much of the communication of a data-parallel step is hidden behind the computation, beside torch on gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import axonmpi as ax
from axonmpi.cli.bench.timing import start_gloo

MEBIBYTE = 1 << 20
WIDTH, LAYERS = 768, 12


def median_seconds(variants: dict[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    """Let the variants take turns; the first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(blocks + 1):
        for name, call in variants.items():
            ax.barrier()
            begun = time.perf_counter()
            call()
            ax.barrier()
            if block:
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in taken.items()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def step(wrapped: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()

    return run


def print_bare(blocks: int, gbit: float) -> None:
    """Print the times of an all_reduce of 64 MiB; collective."""
    large = torch.zeros(64 * MEBIBYTE // 4)
    symmetric = ax.symmetric_empty(large.shape, large.dtype).zero_()
    bare = median_seconds(
        {
            "symmetric": lambda: ax.all_reduce(symmetric),
            "ordinary": lambda: ax.all_reduce(large),
            "gloo": lambda: dist.all_reduce(large),
        },
        blocks,
    )
    ideal = 64 * MEBIBYTE * 8 / (gbit * 1e9)
    if ax.is_main_process():
        for name, seconds in bare.items():
            print(f"all_reduce of 64 MiB, {name}: {seconds:.3f} s, {seconds / ideal:.2f} of bytes over bandwidth")


def measured_steps(blocks: int, batch: int) -> dict[str, float]:
    """Return the seconds of a step, alone and with others, and of an all_reduce of its gradients; collective."""
    x = torch.randn(batch, WIDTH)
    ours, stock = ax.DDP(model()), nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    gradients = torch.zeros(sum(parameter.numel() for parameter in ours.parameters()))
    return median_seconds(
        {
            "local": step(model(), x),
            "ours": step(ours, x),
            "gloo": step(stock, x),
            "all_reduce": lambda: ax.all_reduce(gradients),
        },
        blocks,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--batch", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print the times of the steps alone")
    options = parser.parse_args()
    world = ax.init_process_group()
    start_gloo(world)
    if not options.json:
        print_bare(options.blocks, options.gbit)
    steps = measured_steps(options.blocks, options.batch)
    if world.rank == 0 and options.json:
        print(json.dumps(steps))
    elif world.rank == 0:
        print(f"{world.num_nodes} nodes, {world.size} ranks, path {world.default_group.backend.path}")
        print("step, s: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in steps.items()))
        for name in ("ours", "gloo"):
            hidden = 1 - (steps[name] - steps["local"]) / steps["all_reduce"]
            print(f"hidden of {steps['all_reduce']:.3f} s of communication, {name}: {100 * hidden:.0f} %")
    dist.destroy_process_group()
    ax.destroy_process_group()


if __name__ == "__main__":
    main()
