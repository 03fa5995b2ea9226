"""torch.distributed on axonmpi's backend and on gloo: two collectives, and torch's own training wrappers.

Both groups are of the same processes. All-reduces take turns with `axonmpi.all_reduce`, which is what the backend
calls; DDP and FSDP2 are torch's own, on the perceptron of `bench ddp`, FSDP2 with AdamW's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...comm import all_reduce
from ...groups.world import World
from ...utils.text import aligned
from .data_parallel import BATCH, batch_of, build_model, step_of, torch_ddp, torch_fsdp
from .harness.timing import interleave, start_gloo, stock_groups

LARGE = 64 << 20
_SMALL_CALLS, _LARGE_CALLS, _STEPS = 200, 2, 2

Calls = dict[str, Callable[[], object]]


def measure(world: World, blocks: int) -> dict[str, Any]:
    """Measure `blocks` blocks on the ranks of `world`; collective; the figures are in seconds."""
    start_gloo(world)
    groups = {name.removeprefix("torch on "): group for name, group in stock_groups().items()}
    figures = {
        "4 bytes": interleave(_all_reduces(groups, 1), blocks=blocks, calls=_SMALL_CALLS),
        "64 MiB": interleave(_all_reduces(groups, LARGE // 4), blocks=blocks, calls=_LARGE_CALLS),
        "ddp": interleave(_ddp_steps(groups, world), blocks=blocks, calls=_STEPS),
        "fsdp2": interleave(_fsdp_steps(groups, world), blocks=blocks, calls=_STEPS),
    }
    dist.destroy_process_group()
    return {"ranks": world.size, "seconds": figures}


def _all_reduces(groups: dict[str, dist.ProcessGroup], numel: int) -> Calls:
    tensor = torch.zeros(numel)
    calls: Calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
    return {**calls, "ax.all_reduce": lambda: all_reduce(tensor)}


def _ddp_steps(groups: dict[str, dist.ProcessGroup], world: World) -> Calls:
    batch = batch_of(world, BATCH)
    wrapped = {name: step_of(torch_ddp(group), batch) for name, group in groups.items()}
    return {**wrapped, "local": step_of(build_model(), batch)}


def _fsdp_steps(groups: dict[str, dist.ProcessGroup], world: World) -> Calls:
    batch = batch_of(world, BATCH)
    models = {name: torch_fsdp(build_model(), group) for name, group in groups.items()}
    return {name: step_of(model, batch, torch.optim.AdamW(model.parameters())) for name, model in models.items()}


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    rows = [["", "ranks", "gloo", "axonmpi", "gloo / axonmpi", "beside"]]
    for result in results:
        each, ranks = result["seconds"], str(result["ranks"])
        ddp, local = each["ddp"], each["ddp"]["local"]
        more = {name: ddp[name] - local for name in ("gloo", "axonmpi")}
        rows += [
            _row("all_reduce of 4 bytes, us", ranks, each["4 bytes"], 1e6, "ax.all_reduce"),
            _row("all_reduce of 64 MiB, ms", ranks, each["64 MiB"], 1e3, "ax.all_reduce"),
            _row("DDP, ms more a step", ranks, {**more, "a step without": local}, 1e3, "a step without"),
            _row("FSDP2, ms a step", ranks, each["fsdp2"], 1e3),
        ]
    return "\n".join(["torch.distributed on gloo and on axonmpi, medians", *aligned(rows)])


def _row(what: str, ranks: str, seconds: dict[str, float], factor: float, beside: str = "") -> list[str]:
    gloo, ours = seconds["gloo"], seconds["axonmpi"]
    ratio = f"{gloo / ours:.1f}" if ours > 0 else "no overhead"
    more = f"{beside}: {seconds[beside] * factor:.1f}" if beside else ""
    return [what, ranks, f"{gloo * factor:.1f}", f"{ours * factor:.1f}", ratio, more]
