"""`axonmpi chart`: a pipeline schedule as a picture, in the terminal or in a file.

    axonmpi chart --schedule 1f1b --stages 4 --micro-batches 8
    axonmpi chart --schedule zero-bubble --stages 8 --chunks 2 --micro-batches 16 --output chart.svg
    axonmpi chart --schedule 1f1b --stages 4 --micro-batches 8 --trace run.json --output chart.png

No stage is run. With a trace, the ideal has the times of the real run, so that the two differ by waiting only.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..launch.launcher_variables import is_first_launched
from ..pipeline import Costs, PipelineSchedule, Schedule, Timeline, make_schedule, simulate
from ..pipeline.schedule.chart import describe, draw_chart, text_chart, text_scale
from ..pipeline.schedule.simulator import measured_costs
from ..pipeline.schedule.trace import last_step, read_trace
from .arguments import file_to_write, parse_arguments, positive
from .output import print_on_first_rank, refuse

_PROGRAM = "axonmpi chart"
_COSTS = {
    "forward": "the forward of one stage",
    "backward": "its backward, whole",
    "backward_input": "the gradient of its input alone",
    "backward_weight": "the gradient of its weights alone",
    "transfer": "a message",
}
_MOST_COLUMNS = 240


def main(argv: Sequence[str]) -> int:
    """Draw a schedule; local, no MPI is started.

    Args:
        argv: The flags.

    Returns:
        0; 2 if the numbers do not fit together or the trace is of another schedule.

    Raises:
        SystemExit: A flag is unknown or bad (code 2), or help was asked for (code 0).
    """
    options = parse_arguments(_parser(), argv)
    try:
        schedule = _schedule(options)
        measured = None if options.trace is None else last_step(read_trace(options.trace), schedule)
        ideal = simulate(schedule, _costs(options, measured), rendezvous=options.rendezvous)
    except (ValueError, OSError) as error:
        return refuse(_PROGRAM, str(error))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MOST_COLUMNS
    print_on_first_rank(_text(ideal, measured, columns))
    if options.output is not None and is_first_launched():
        draw_chart(ideal, options.output, measured)
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    ranks, rest = divmod(options.stages, options.chunks)
    if rest:
        raise ValueError(
            f"--stages: expected a multiple of --chunks, which is the number of stages on each rank, "
            f"got {options.stages} stages and {options.chunks} chunks"
        )
    return make_schedule(PipelineSchedule(options.schedule), ranks, options.micro_batches, options.chunks)


def _costs(options: argparse.Namespace, measured: Timeline | None) -> Costs:
    """Return the times of the flags; of the others those of the real run, or the defaults."""
    given = {name: getattr(options, name) for name in _COSTS if getattr(options, name) is not None}
    return dataclasses.replace(Costs() if measured is None else measured_costs(measured), **given)


def _text(ideal: Timeline, measured: Timeline | None, columns: int) -> str:
    if measured is None:
        return f"{describe(ideal)}\n\n{text_chart(ideal, columns)}"
    scale = min(text_scale(timeline, columns) for timeline in (ideal, measured))
    return "\n\n".join(
        [
            f"ideal: {describe(ideal)}",
            text_chart(ideal, scale=scale),
            f"measured: {describe(measured)}",
            text_chart(measured, scale=scale),
            f"measured / ideal time: {measured.makespan / ideal.makespan:.3f}",
        ]
    )


# ---- options ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Draw a pipeline schedule: which rank does what, and when it waits.",
        epilog="Times are in any unit. In the chart F is forward, B backward, I and W its two halves.",
    )
    names = [kind.value for kind in PipelineSchedule]
    parser.add_argument("--schedule", choices=names, default="1f1b", help="which schedule (default: 1f1b)")
    parser.add_argument("--stages", type=positive, required=True, metavar="N", help="stages of the model")
    parser.add_argument(
        "--micro-batches", type=positive, required=True, metavar="N", help="micro-batches of a step"
    )
    parser.add_argument("--chunks", type=positive, default=1, metavar="N", help="stages on each rank (default: 1)")
    for name, words in _COSTS.items():
        text = f"how long {words} takes (default: {getattr(Costs, name):g})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="TIME", help=text)
    parser.add_argument("--rendezvous", action="store_true", help="let sends wait until they are received")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="show a real run beside it, from its trace")
    picture = partial(file_to_write, endings=(".png", ".svg"))
    parser.add_argument("--output", type=picture, metavar="FILE", help="draw a picture into FILE.png or FILE.svg")
    return parser
