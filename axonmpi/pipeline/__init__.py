"""Pipeline parallelism: each rank has one or several stages of a model, and micro-batches go through the stages.

`Pipeline` runs GPipe, 1F1B, interleaved 1F1B and zero-bubble schedules, or a schedule of your own; `split_module`
cuts a model into stages. A schedule is data, a list of actions for each rank, so it can be simulated, checked and
drawn without a run. Gradients equal those of one process with the full batch.

Read first: `schedule/actions.py` (the actions), `schedule/schedules.py` (the schedules), then `pipeline.py`. The
folder `runtime/` executes actions. The package imports `wrapping`, `across_ranks`, `groups` and packages below
these.
"""

from __future__ import annotations

from .memory_stats import PipelineMemoryStats
from .pipeline import Pipeline
from .randomness import microbatch_seed
from .runtime.stage import PipelineStage, Synchronized
from .schedule.actions import Action, ActionKind, Schedule, parse_action
from .schedule.schedule_error import ScheduleError
from .schedule.schedules import PipelineSchedule, make_schedule
from .schedule.simulator import Costs, simulate
from .schedule.timeline import Span, Timeline
from .schedule.validator import validate
from .skips import pop, stash
from .splitting import split_module

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "Schedule",
    "ScheduleError",
    "Span",
    "Synchronized",
    "Timeline",
    "make_schedule",
    "microbatch_seed",
    "parse_action",
    "pop",
    "simulate",
    "split_module",
    "stash",
    "validate",
]
