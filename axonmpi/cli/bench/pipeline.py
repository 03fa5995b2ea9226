"""A pipeline's training step by each schedule: ours, torch's on gloo and on ours, and the ideal.

Stages are rows of transformer blocks, equally many on each rank. For each schedule four variants take turns:
ours, `torch.distributed.pipelining` on gloo and on axonmpi's backend of torch.distributed, and the computation
alone. For the last, all ranks compute what the
schedule has them compute, at once, in the same order and with the same modules, but send nothing and wait for no
other rank. The times of their actions go into the simulator. The time that comes out is the ideal, in which ranks
wait only where the schedule has a bubble.

Before anything is timed, gradients of all variants are compared with those of one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...comm import all_reduce_max
from ...groups.world import World
from ...pipeline import Costs, PipelineSchedule, Schedule, make_schedule, simulate
from .harness.timing import count_cores, interleave, start_gloo, stock_groups
from .pipeline_steps import CHUNKS, HEAD_WIDTH, Computation, Sizes, Step, Task, our_step, torch_step

STEPS_PER_BLOCK = 2
_TOLERANCE = 1e-4
_VARIANTS = ("compute", "axonmpi", "torch on gloo", "torch on axonmpi")


@dataclass(frozen=True)
class Case:
    """A schedule, here and in torch.

    Attributes:
        kind: The schedule.
        chunks: Stages on each rank.
        made_by: The name of the class in `torch.distributed.pipelining`.
    """

    kind: PipelineSchedule
    chunks: int
    made_by: str


CASES = {
    "gpipe": Case(PipelineSchedule.GPIPE, 1, "ScheduleGPipe"),
    "1f1b": Case(PipelineSchedule.ONE_F_ONE_B, 1, "Schedule1F1B"),
    "zero-bubble": Case(PipelineSchedule.ZERO_BUBBLE, 1, "ScheduleInterleavedZeroBubble"),
    "interleaved-1f1b": Case(PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, CHUNKS, "ScheduleInterleaved1F1B"),
    "zero-bubble-v": Case(PipelineSchedule.ZERO_BUBBLE, CHUNKS, "ScheduleZBVZeroBubble"),
}


def measure(world: World, blocks: int, sizes: Sizes, names: Sequence[str]) -> dict[str, Any]:
    """Measure on the ranks of a world; collective; the figures are in milliseconds.

    Args:
        world: The ranks.
        blocks: How often each variant takes its turn.
        sizes: Of the model and the batch.
        names: Some of `CASES`.

    Raises:
        RuntimeError: A variant's gradients differ from those of one process; on all ranks.
        ValueError: A size does not fit these ranks.
    """
    _check_sizes(world, sizes)
    start_gloo(world)
    task = Task(world, sizes)
    cases = {name: CASES[name] for name in names}
    schedules = {
        name: make_schedule(case.kind, world.size, sizes.microbatches, case.chunks) for name, case in cases.items()
    }
    computations = {name: Computation(task, schedule) for name, schedule in schedules.items()}
    pipelines: dict[str, Step] = {}
    groups = stock_groups()
    for name, case in cases.items():
        pipelines[f"axonmpi {name}"] = our_step(task, case.kind, case.chunks)
        for stock, group in groups.items():
            pipelines[f"{stock} {name}"] = torch_step(task, schedules[name], case.made_by, group)
    check_gradients(task, pipelines)
    variants = {**pipelines, **{f"compute {name}": each.step for name, each in computations.items()}}
    seconds = interleave(variants, blocks=blocks, calls=STEPS_PER_BLOCK)
    dist.destroy_process_group()
    milliseconds = {name: value * 1e3 for name, value in seconds.items()}
    return {
        "ranks": world.size,
        "cores": count_cores(world),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in task.layers.parameters()),
        **asdict(sizes),
        "schedules": {
            name: {
                **{who: milliseconds[f"{who} {name}"] for who in _VARIANTS},
                **_simulated(schedules[name], computations[name].costs()),
            }
            for name in cases
        },
    }


def _simulated(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    timeline = simulate(schedule, costs)
    return {
        "ideal": timeline.makespan * 1e3,
        "bubble": timeline.bubble,
        "peak_activations": timeline.peak_activations,
        "costs": {kind: [t * 1e3 for t in times] for kind, times in asdict(costs).items() if kind != "transfer"},
    }


def check_gradients(task: Task, variants: Mapping[str, Step]) -> None:
    """Compare the gradients that each variant leaves on this rank with those of one process; collective.

    Raises:
        RuntimeError: They differ, or are not for this rank's share of the parameters; on all ranks.
    """
    task.step_of_one_process()
    wanted = task.gradients()
    share = len(wanted) // task.world.size
    for name, step in variants.items():
        step()
        pairs = zip(task.gradients(), wanted, strict=True)
        errors = [
            (found - right).abs().max() / right.abs().max()
            for found, right in pairs
            if found is not None and right is not None
        ]
        worst = torch.stack(errors).max() if len(errors) == share else torch.tensor(math.inf)
        worst.nan_to_num_(nan=math.inf)
        all_reduce_max(worst)
        if not worst <= _TOLERANCE:
            raise RuntimeError(
                f"{name} on {task.world.size} ranks: gradients are not those of one process, off by {worst:.1e} of "
                f"the largest, expected at most {_TOLERANCE:.0e}"
            )


# ---- table ------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    first = results[0]
    shape = f"[{first['samples']}, {first['length']}, {first['width']}]"
    batches = f"{first['microbatches']} micro-batches of {shape}"
    lines = [f"{first['layers']} transformer blocks a rank, {batches}; ms a step, medians"]
    for result in results:
        stock = result["schedules"].get("1f1b", {}).get("torch on gloo", math.nan)
        lines.append(
            f"\n{result['ranks']} ranks, {result['cores']} cores, threads of a rank: {result['threads']}, "
            f"{result['parameters'] / 1e6:.1f} M parameters"
        )
        lines.append(
            f"{'schedule':<17} {'compute':>8} {'bubble':>7} {'ideal':>8} {'axonmpi':>8} "
            f"{'torch on gloo':>14} {'torch on axonmpi':>17} | {'ours / ideal':>12} {'gloo / ours':>12} "
            f"{'gloo 1f1b / ours':>17} | activations held"
        )
        lines += [_row(name, figures, stock) for name, figures in result["schedules"].items()]
    return "\n".join(lines)


def _row(name: str, figures: dict[str, Any], stock: float) -> str:
    ours, gloo = figures["axonmpi"], figures["torch on gloo"]
    return (
        f"{name:<17} {figures['compute']:8.1f} {figures['bubble']:7.1%} {figures['ideal']:8.1f} {ours:8.1f} "
        f"{gloo:14.1f} {figures['torch on axonmpi']:17.1f} | {ours / figures['ideal']:12.2f} {gloo / ours:12.2f} "
        f"{stock / ours:17.2f} | {' '.join(map(str, figures['peak_activations']))}"
    )


# ---- options ----------------------------------------------------------------------------------------------------

_HELP = {
    "layers": f"transformer blocks on each rank, a multiple of {CHUNKS}",
    "width": f"features of a block, a multiple of {HEAD_WIDTH}",
    "length": "positions of a sample",
    "samples": "samples of a micro-batch",
    "microbatches": "micro-batches of a step, a multiple of the ranks",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for schedules and sizes; local."""
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=tuple(CASES),
        default=list(CASES),
        help=f"some of {', '.join(CASES)} (default: all)",
        metavar="NAME",
    )
    defaults = asdict(Sizes())
    for name, text in _HELP.items():
        parser.add_argument(
            "--micro-batches" if name == "microbatches" else f"--{name}",
            dest=name,
            type=int,
            default=defaults[name],
            help=f"{text} (default: {defaults[name]})",
            metavar="N",
        )


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes that the options give; local."""
    return Sizes(**{name: getattr(options, name) for name in _HELP})


def _check_sizes(world: World, sizes: Sizes) -> None:
    """Raise ValueError unless the sizes fit all schedules, torch's too."""
    divisors = {"layers": CHUNKS, "width": HEAD_WIDTH, "microbatches": world.size}
    for name, value in asdict(sizes).items():
        divisor = divisors.get(name, 1)
        if value < 1 or value % divisor:
            expected = f"a multiple of {divisor}" if divisor > 1 else "a positive number"
            raise ValueError(f"{name}: expected {expected} on {world.size} ranks, got {value}")
