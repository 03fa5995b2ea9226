"""`axonmpi bench pipeline`: a training step by each schedule: axonmpi, torch on two backends, and the ideal.

Stages are rows of transformer blocks, equally many on each rank. For each schedule four variants take turns:
axonmpi, `torch.distributed.pipelining` on gloo and on axonmpi's backend of torch.distributed, and the computation
alone. For the last, all ranks compute their actions of the schedule at once, in the same order and with the same
modules, but send nothing and wait for no other rank. The simulator takes the times of these actions and returns the
ideal, in which ranks wait only in the bubble of the schedule.

Before anything is timed, gradients of all variants are compared with those of one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ...groups.world import World
from ...pipeline import Costs, PipelineSchedule, Schedule, make_schedule, simulate
from .harness.benchmark import Benchmark, Figures, check_error, check_multiple, largest_error
from .harness.options import TRACE, choices, number
from .harness.table import BAR, Column, figure, ratio, table_lines, text
from .harness.timing import MILLISECONDS, interleave
from .harness.torch_groups import ON_AXONMPI, ON_GLOO, torch_groups
from .pipeline_steps import HEAD_WIDTH, Computation, Step, Task, our_step, torch_step

_CHUNKS = 2
_STEPS_PER_BLOCK = 2


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule of axonmpi's and of torch's.

    Attributes:
        kind: The schedule.
        chunks: Stages on each rank.
        torch_class: The name of the class in `torch.distributed.pipelining`.
    """

    kind: PipelineSchedule
    chunks: int
    torch_class: str


CASES = {
    "gpipe": ScheduleCase(PipelineSchedule.GPIPE, 1, "ScheduleGPipe"),
    "1f1b": ScheduleCase(PipelineSchedule.ONE_F_ONE_B, 1, "Schedule1F1B"),
    "zero-bubble": ScheduleCase(PipelineSchedule.ZERO_BUBBLE, 1, "ScheduleInterleavedZeroBubble"),
    "interleaved-1f1b": ScheduleCase(PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, _CHUNKS, "ScheduleInterleaved1F1B"),
    "zero-bubble-v": ScheduleCase(PipelineSchedule.ZERO_BUBBLE, _CHUNKS, "ScheduleZBVZeroBubble"),
}


# ---- measuring --------------------------------------------------------------------------------------------------


def measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure on the ranks of a world; collective; the figures are in milliseconds.

    Raises:
        RuntimeError: A variant's gradients differ from those of one process; on all ranks.
        ValueError: A size does not fit these ranks.
    """
    check_multiple("layers", options.layers, _CHUNKS)
    check_multiple("width", options.width, HEAD_WIDTH)
    check_multiple("microbatches", options.microbatches, world.size, "ranks")

    # All ranks make the pipelines in the same order, since making one is collective.
    task = Task(world, options)
    groups = torch_groups()
    schedules: dict[str, Schedule] = {}
    computations: dict[str, Computation] = {}
    pipelines: dict[str, Step] = {}
    for name in options.schedules:
        case = CASES[name]
        schedules[name] = make_schedule(case.kind, world.size, options.microbatches, case.chunks)
        computations[name] = Computation(task, schedules[name])
        pipelines[f"axonmpi {name}"] = our_step(task, case.kind, case.chunks)
        for on_backend, group in groups.items():
            pipelines[f"{on_backend} {name}"] = torch_step(task, schedules[name], case.torch_class, group)
    check_gradients(task, pipelines)

    # The computations alone take turns with the pipelines, and note the times of their actions for the ideal.
    alone = {f"compute {name}": computation.step for name, computation in computations.items()}
    times = interleave({**pipelines, **alone}, blocks=options.blocks, calls=_STEPS_PER_BLOCK, unit=MILLISECONDS)
    return {
        "parameters": sum(p.numel() for p in task.layers.parameters()),
        **{name: getattr(options, name) for name in ("layers", "width", "length", "samples", "microbatches")},
        "schedules": {
            name: {
                **{variant: times[f"{variant} {name}"] for variant in ("compute", "axonmpi", ON_GLOO, ON_AXONMPI)},
                **_simulated(schedules[name], computations[name].costs()),
            }
            for name in options.schedules
        },
    }


def _simulated(schedule: Schedule, costs: Costs) -> Figures:
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
    expected = task.gradients()
    share = len(expected) // task.world.size
    for name, step in variants.items():
        step()
        gradients = task.gradients()
        error = math.inf
        if len(gradients) == share:
            error = largest_error(list(gradients.values()), [expected[index] for index in gradients])
        check_error(name, "gradients", error, task.world)


# ---- table ------------------------------------------------------------------------------------------------------

_COLUMNS: list[Column] = [
    ("schedule", text("schedule")),
    ("compute", figure("compute")),
    ("bubble", figure("bubble", form=".1%")),
    ("ideal", figure("ideal")),
    ("axonmpi", figure("axonmpi")),
    (ON_GLOO, figure(ON_GLOO)),
    (ON_AXONMPI, figure(ON_AXONMPI)),
    BAR,
    ("ours / ideal", ratio("axonmpi", "ideal")),
    ("gloo / ours", ratio(ON_GLOO, "axonmpi")),
    ("gloo 1f1b / ours", ratio("gloo 1f1b", "axonmpi")),
    BAR,
    ("activations held", lambda row: " ".join(map(str, row["peak_activations"]))),
]


def table(results: list[Figures]) -> str:
    """Format the figures of several numbers of ranks."""
    first = results[0]
    shape = f"[{first['samples']}, {first['length']}, {first['width']}]"
    batches = f"{first['microbatches']} micro-batches of {shape}"
    lines = [f"{first['layers']} transformer blocks a rank, {batches}; ms a step, medians"]
    for result in results:
        gloo_1f1b = result["schedules"].get("1f1b", {}).get(ON_GLOO, math.nan)
        lines.append(
            f"\n{result['ranks']} ranks, {result['cores']} cores, threads of a rank: {result['threads']}, "
            f"{result['parameters'] / 1e6:.1f} M parameters"
        )
        rows = [
            {"schedule": name, "gloo 1f1b": gloo_1f1b, **figures} for name, figures in result["schedules"].items()
        ]
        lines += table_lines(_COLUMNS, rows, left=[0])
    return "\n".join(lines)


PIPELINE = Benchmark(
    "a step of a pipeline by each schedule: ours, torch's on gloo and on ours, and the ideal",
    measure,
    table,
    options={
        "--schedules": choices(tuple(CASES)),
        "--layers": number(f"transformer blocks on each rank, a multiple of {_CHUNKS}", 4),
        "--width": number(f"features of a block, a multiple of {HEAD_WIDTH}", 192),
        "--length": number("positions of a sample", 64),
        "--samples": number("samples of a micro-batch", 1),
        "--micro-batches": {
            "dest": "microbatches",
            **number("micro-batches of a step, a multiple of the ranks", 8),
        },
        "--trace": TRACE,
    },
)
