"""Pipeline parallelism: schedules as data, one executor for all of them, and pictures."""

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
