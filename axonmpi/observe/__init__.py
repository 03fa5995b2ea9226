"""What the ranks of a job do, seen from any process of the same user, and the end of jobs that wait for ever."""

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
