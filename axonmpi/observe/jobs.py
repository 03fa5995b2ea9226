"""Choice of a job of this node: the only job, or by its name, or by one of its processes."""

from __future__ import annotations

from ..record.reader import Condition, RankRecord, job_names, records_of
from ..utils.processes import process
from ..utils.text import counted


def find_job(name: str = "") -> list[RankRecord]:
    """Return the records of a job's ranks on this node, in rank order; local.

    Args:
        name: Beginning of the job's name; or process number of a rank, or of its launcher; empty for the running
            job, or else the job that has ended last.

    Raises:
        LookupError: There is no such job, or more than one; the message lists the jobs.
    """
    jobs = {job: records for job in job_names() if (records := records_of(job))}
    if not jobs:
        raise LookupError(
            "no job of this user has records on this node: start it with axonmpi on more than one rank, and ask on "
            "a node that it runs on"
        )
    if name:
        found = [records for job, records in jobs.items() if job.startswith(name)]
        found += [records for records in jobs.values() if name.isdecimal() and int(name) in _ancestry(records)]
    else:
        ended = {
            job for job, records in jobs.items() if all(each.condition() is Condition.GONE for each in records)
        }
        running = [records for job, records in jobs.items() if job not in ended]
        found = running or [next(iter(jobs.values()))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(
        f"{job} ({counted(records[0].size, 'rank')} of {records[0].identity['program']})"
        for job, records in jobs.items()
    )
    raise LookupError(f"expected the name or a process of one of these jobs, got {name!r}: {listed}")


def _ancestry(records: list[RankRecord]) -> set[int]:
    """Return the process numbers of ranks and of their ancestors, except the first process of the system."""
    found: set[int] = set()
    for record in records:
        number = record.pid
        while number > 1 and number not in found:
            found.add(number)
            known = process(number)
            number = 0 if known is None else known.parent
    return found
