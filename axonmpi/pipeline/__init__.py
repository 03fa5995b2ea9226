"""Pipeline parallelism: schedules as data, one executor for all of them, and pictures (layer 5)."""

from __future__ import annotations

from .actions import Action, ActionKind, Schedule, parse_action
from .memory_stats import PipelineMemoryStats
from .pipeline import Pipeline
from .randomness import microbatch_seed
from .schedules import PipelineSchedule, make_schedule
from .simulator import Costs, Span, Timeline, simulate
from .skips import pop, stash
from .splitting import split_module
from .stage import PipelineStage, Synchronized
from .validator import ScheduleError, validate

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
