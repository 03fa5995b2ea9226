"""Pipeline parallelism: schedules as data, what can be known of them without running, and pictures (layer 5)."""

from __future__ import annotations

from .actions import Action, ActionKind, Schedule, parse_action
from .memory_stats import PipelineMemoryStats
from .schedules import PipelineSchedule, make_schedule
from .simulator import Costs, Span, Timeline, simulate
from .validator import ScheduleError, validate

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "make_schedule",
    "parse_action",
    "simulate",
    "validate",
]
