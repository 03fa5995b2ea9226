"""Which job somebody means: the only one here, or by its name, or by the number of one of its processes."""

from __future__ import annotations

from ..utils.processes import process
from .board import Condition, RankPage, job_names, pages_of


def find_job(name: str = "") -> list[RankPage]:
    """Return the pages of a job's ranks on this node, in rank order; local.

    Args:
        name: The beginning of the job's name; or the number of a rank's process, or of its launcher's; empty: the
            job that runs, or else the one that has ended last.

    Raises:
        LookupError: There is none, or more than one; the message says what there is.
    """
    jobs = {job: pages for job in job_names() if (pages := pages_of(job))}
    if not jobs:
        raise LookupError(
            "no job of this user has pages on this node: start it with axonmpi on more than one rank, and ask on a "
            "node that it runs on"
        )
    if name:
        found = [pages for job, pages in jobs.items() if job.startswith(name)]
        found += [pages for pages in jobs.values() if name.isdecimal() and int(name) in _family(pages)]
    else:
        running = [pages for pages in jobs.values() if any(map(_runs, pages))]
        found = running or [next(iter(jobs.values()))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{job} ({pages[0].identity['program']})" for job, pages in jobs.items())
    raise LookupError(f"expected the name or a process of one of these jobs, got {name!r}: {listed}")


def _runs(page: RankPage) -> bool:
    return page.condition() is not Condition.GONE


def _family(pages: list[RankPage]) -> set[int]:
    """Return the processes of ranks and their ancestors, but for the first process of all."""
    found: set[int] = set()
    for page in pages:
        number: int | None = page.pid
        while number is not None and number > 1 and number not in found:
            found.add(number)
            known = process(number)
            number = None if known is None else known.parent
    return found
