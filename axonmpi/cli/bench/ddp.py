"""What data parallelism adds to a step: ours, and torch's on gloo.

The model is a multilayer perceptron of 12.6 million parameters with a batch of 64 a rank. Three copies take turns:
one without data parallelism (all ranks compute, nobody communicates), one wrapped by axonmpi, one by
`torch.nn.parallel.DistributedDataParallel` on gloo. Overhead is a wrapped step's time less the local step's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp import DistributedDataParallel
from ...groups.world import World
from ...utils.text import aligned
from .gloo import start_gloo
from .timing import interleave

__all__ = ["WIDTHS", "build_model", "measure", "table"]

WIDTHS = (1024, 2048, 2048, 2048, 1024)
BATCH = 64
STEPS_PER_BLOCK = 3


def measure(world: World, blocks: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; the figures are in milliseconds."""
    start_gloo(world)
    generator = torch.Generator().manual_seed(world.rank)
    batch = torch.randn(BATCH, WIDTHS[0], generator=generator)
    stock = nn.parallel.DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    seconds = interleave(
        {
            "local": _step(build_model(), batch),
            "axonmpi": _step(DistributedDataParallel(build_model()), batch),
            "torch on gloo": _step(stock, batch),
        },
        blocks=blocks,
        calls=STEPS_PER_BLOCK,
    )
    dist.destroy_process_group()
    milliseconds = {name: value * 1e3 for name, value in seconds.items()}
    return {
        "ranks": world.size,
        "parameters": sum(p.numel() for p in stock.parameters()),
        "machine": platform.machine(),
        "milliseconds": milliseconds,
        "overhead": {name: milliseconds[name] - milliseconds["local"] for name in ("axonmpi", "torch on gloo")},
    }


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    title = f"DDP, {results[0]['parameters'] / 1e6:.1f} M parameters, batch {BATCH} a rank; ms a step, medians"
    rows = [["ranks", "local", "axonmpi", "gloo", "|", "overhead", "gloo", "gloo / ours"]]
    for result in results:
        ours, stock = result["overhead"]["axonmpi"], result["overhead"]["torch on gloo"]
        times = [f"{time:.1f}" for time in result["milliseconds"].values()]
        ratio = f"{stock / ours:.1f}" if ours > 0 else "no overhead"
        rows.append([str(result["ranks"]), *times, "|", f"{ours:.1f}", f"{stock:.1f}", ratio])
    return "\n".join([title, *aligned(rows)])


def build_model() -> nn.Sequential:
    """Return the model, the same on every rank but for its values; local."""
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _step(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step
