"""What the ranks of a job do, seen from any process of the same user, and the end of jobs that wait for ever."""

from .board import Condition, Group, Operation, RankPage, job_names, last_words, page_of_process, pages_of
from .judgement import Standing, in_vain, look_at
from .report import cause_of, table_of, text_of_stacks
from .stacks import stacks_of
from .watchdog import still_under_way, watch, write_to

__all__ = [
    "Condition",
    "Group",
    "Operation",
    "RankPage",
    "Standing",
    "cause_of",
    "in_vain",
    "job_names",
    "last_words",
    "look_at",
    "page_of_process",
    "pages_of",
    "stacks_of",
    "still_under_way",
    "table_of",
    "text_of_stacks",
    "watch",
    "write_to",
]
