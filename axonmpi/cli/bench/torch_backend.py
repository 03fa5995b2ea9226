"""torch.distributed on axonmpi's backend and on gloo: two all-reduces, and torch's own training wrappers.

Both groups are of the same processes. All-reduces take turns with `axonmpi.all_reduce`, which the backend calls.
DDP and FSDP2 are torch's own, on the perceptron of `bench ddp`, FSDP2 with AdamW's steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ...comm import all_reduce
from ...groups.world import World
from .data_parallel import BATCH, batch_of, build_model, step_of, torch_ddp
from .harness.benchmark import Benchmark, Figures
from .harness.table import Column, figure, gain, table_lines, text
from .harness.timing import MICROSECONDS, MILLISECONDS, interleave
from .harness.torch_groups import ON_AXONMPI, ON_GLOO, torch_fsdp, torch_groups

_LARGE = 64 << 20
_SMALL_CALLS, _LARGE_CALLS, _STEPS = 200, 2, 2

Calls = dict[str, Callable[[], object]]


def _measure(world: World, options: argparse.Namespace) -> Figures:
    by_name = torch_groups()
    groups = {"gloo": by_name[ON_GLOO], "axonmpi": by_name[ON_AXONMPI]}
    batch = batch_of(world, BATCH)
    time = partial(interleave, blocks=options.blocks)
    return {
        "seconds": {
            "4 bytes": time(_all_reduces(groups, 1), calls=_SMALL_CALLS),
            "64 MiB": time(_all_reduces(groups, _LARGE // 4), calls=_LARGE_CALLS),
            "ddp": time(
                {
                    **{name: step_of(torch_ddp(group), batch) for name, group in groups.items()},
                    "local": step_of(build_model(), batch),
                },
                calls=_STEPS,
            ),
            "fsdp2": time({name: _fsdp_step(group, batch) for name, group in groups.items()}, calls=_STEPS),
        }
    }


def _all_reduces(groups: dict[str, dist.ProcessGroup], numel: int) -> Calls:
    tensor = torch.zeros(numel)
    calls: Calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
    return {**calls, "ax.all_reduce": lambda: all_reduce(tensor)}


def _fsdp_step(group: dist.ProcessGroup, batch: torch.Tensor) -> Callable[[], None]:
    model = torch_fsdp(build_model(), group)
    return step_of(model, batch, torch.optim.AdamW(model.parameters()))


def _row(title: str, ranks: int, seconds: dict[str, float], unit: float, beside: str = "") -> Figures:
    times = {name: value * unit for name, value in seconds.items()}
    return {"title": title, "ranks": ranks, **times, "beside": f"{beside}: {times[beside]:.1f}" if beside else ""}


def _rows(result: Figures) -> list[Figures]:
    ranks, seconds = result["ranks"], result["seconds"]
    local = seconds["ddp"]["local"]
    added = {name: seconds["ddp"][name] - local for name in ("gloo", "axonmpi")}
    return [
        _row("all_reduce of 4 bytes, us", ranks, seconds["4 bytes"], MICROSECONDS, "ax.all_reduce"),
        _row("all_reduce of 64 MiB, ms", ranks, seconds["64 MiB"], MILLISECONDS, "ax.all_reduce"),
        _row("DDP, ms more a step", ranks, {**added, "a step without": local}, MILLISECONDS, "a step without"),
        _row("FSDP2, ms a step", ranks, seconds["fsdp2"], MILLISECONDS),
    ]


_COLUMNS: list[Column] = [
    ("", text("title")),
    ("ranks", text("ranks")),
    ("gloo", figure("gloo")),
    ("axonmpi", figure("axonmpi")),
    ("gloo / axonmpi", lambda row: gain(row["gloo"], row["axonmpi"])),
    ("beside", text("beside")),
]


def _table(results: list[Figures]) -> str:
    rows = [row for result in results for row in _rows(result)]
    return "\n".join(["torch.distributed on gloo and on axonmpi, medians", *table_lines(_COLUMNS, rows)])


TORCH = Benchmark(
    "torch.distributed on axonmpi's backend and on gloo: all-reduces, torch's own DDP and FSDP2",
    _measure,
    _table,
    blocks=7,
)
