"""Observation of a job from its ranks' records: waits, stacks, and the watchdog that ends a job which cannot go on.

A rank that waits in a collective looks the same as one that computes. These functions tell them apart, for
`axonmpi why`, `axonmpi top`, the watchdog of each rank, and programs. Read `waits.py` and `watchdog.py` first. The
package imports `record`, `launch` and packages below.
"""

from ..record.reader import Condition, Group, Operation, RankRecord, describe_process, job_names, records_of
from .stacks import stacks_of
from .waits import RankState, states_of, stuck_ranks
from .watchdog import unfinished_operation, watch, write_to
from .watchdog_text import cause_of, table_of, text_of_stacks

__all__ = [
    "Condition",
    "Group",
    "Operation",
    "RankRecord",
    "RankState",
    "cause_of",
    "describe_process",
    "job_names",
    "records_of",
    "stacks_of",
    "states_of",
    "stuck_ranks",
    "table_of",
    "text_of_stacks",
    "unfinished_operation",
    "watch",
    "write_to",
]
