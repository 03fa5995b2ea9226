"""What the ranks of a job do, seen from any process of the same user, and the end of jobs that wait for ever."""

from .board import Condition, Group, Operation, RankPage, job_names, page_of_process, pages_of
from .stacks import answer_when_asked, stacks_of

__all__ = [
    "Condition",
    "Group",
    "Operation",
    "RankPage",
    "answer_when_asked",
    "job_names",
    "page_of_process",
    "pages_of",
    "stacks_of",
]
