"""Pipeline parallelism: schedules as data, what can be known of them without running, and pictures (layer 5)."""

from __future__ import annotations

from .actions import Action, ActionKind, Schedule, parse_action
from .schedules import PipelineSchedule, make_schedule

__all__ = ["Action", "ActionKind", "PipelineSchedule", "Schedule", "make_schedule", "parse_action"]
