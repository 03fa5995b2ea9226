"""Which job somebody means: the only one here, or by its name, or by the number of one of its processes."""

from __future__ import annotations

from ..record.reader import Condition, RankRecord, job_names, records_of
from ..utils.processes import process


def find_job(name: str = "") -> list[RankRecord]:
    """Return the records of a job's ranks on this node, in rank order; local.

    Args:
        name: The beginning of the job's name; or the number of a rank's process, or of its launcher's; empty: the
            job that runs, or else the one that has ended last.

    Raises:
        LookupError: There is none, or more than one; the message says what there is.
    """
    jobs = {job: records for job in job_names() if (records := records_of(job))}
    if not jobs:
        raise LookupError(
            "no job of this user has records on this node: start it with axonmpi on more than one rank, and ask on a "
            "node that it runs on"
        )
    if name:
        found = [records for job, records in jobs.items() if job.startswith(name)]
        found += [records for records in jobs.values() if name.isdecimal() and int(name) in _family(records)]
    else:
        running = [records for records in jobs.values() if any(map(_runs, records))]
        found = running or [next(iter(jobs.values()))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{job} ({records[0].identity['program']})" for job, records in jobs.items())
    raise LookupError(f"expected the name or a process of one of these jobs, got {name!r}: {listed}")


def _runs(record: RankRecord) -> bool:
    return record.condition() is not Condition.GONE


def _family(records: list[RankRecord]) -> set[int]:
    """Return the processes of ranks and their ancestors, but for the first process of all."""
    found: set[int] = set()
    for record in records:
        number: int | None = record.pid
        while number is not None and number > 1 and number not in found:
            found.add(number)
            known = process(number)
            number = None if known is None else known.parent
    return found
