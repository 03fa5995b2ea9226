"""`axonmpi top`: a live table of a job's ranks and their operations.

rank  node  state   operation                      for    calls/s  phase
   0  n1    lives   all_reduce(float32 [1000])     0.2 s      812
   1  n1    stopped outside of collectives          12 s        0  forward
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..observe.jobs import find_job
from ..observe.wait_graph import seconds_in, wait_graph_of
from ..observe.waits import RankState, states_of
from ..record import Phase
from ..record.reader import Condition, RankRecord
from .arguments import parse_arguments, positive_seconds
from .output import refuse

LONG_SECONDS = 5.0
"""Time after which ranks that wait are shown with the ranks that they wait for."""


def main(argv: Sequence[str]) -> int:
    """Show the ranks of a job until it ends; local.

    Returns:
        0, or 2 if there is no such job.
    """
    parser = argparse.ArgumentParser(prog="axonmpi top", description="Show where the ranks of a job are, live.")
    parser.add_argument("job", nargs="?", default="", metavar="JOB|PID", help="default: the job that runs here")
    parser.add_argument("--interval", type=positive_seconds, default=0.5, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once and end")
    options = parse_arguments(parser, argv)
    try:
        records = find_job(options.job)
    except LookupError as error:
        return refuse("axonmpi top", str(error))
    console = Console()
    if options.once:
        console.print(screen(records, states_of(records), {}))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        rates: dict[int, float] = {}
        before = states_of(records)
        while any(record.condition() is not Condition.GONE for record in records):
            live.update(screen(records, before, rates), refresh=True)
            begun = time.monotonic()
            time.sleep(options.interval)
            now = states_of(records)
            rates = _rates(before, now, time.monotonic() - begun)
            before = now
        live.update(screen(records, before, rates), refresh=True)
    return 0


def _rates(before: Mapping[int, RankState], now: Mapping[int, RankState], seconds: float) -> dict[int, float]:
    """Return the operations a second that each rank has begun between two reads."""
    return {rank: (state.latest - before[rank].latest) / seconds for rank, state in now.items()}


def screen(records: Sequence[RankRecord], states: Mapping[int, RankState], rates: Mapping[int, float]) -> Group:
    """Return the table, and below it the ranks that wait too long; local.

    Args:
        records: The records of the job's ranks.
        states: The state of each rank.
        rates: Operations a second of each rank; empty before the second read.
    """
    table = Table(title=f"job {records[0].job}: {records[0].identity['program']}", title_justify="left", box=None)
    for name in ("rank", "node", "process", "operation", "for", "calls/s", "phase"):
        table.add_column(name, justify="right" if name in ("rank", "for", "calls/s") else "left")
    found = wait_graph_of(states, records[0].size)
    seconds = {rank: seconds_in(state) for rank, state in states.items()}
    for rank, state in states.items():
        is_slow = rank in found.behind and seconds[rank] > LONG_SECONDS
        style = "red" if state.condition is not Condition.LIVES else "yellow" if is_slow else ""
        rate = f"{rates[rank]:,.0f}" if rank in rates else ""
        place = "outside of collectives" if state.operation is None else str(state.operation)
        phase = "" if state.phase is Phase.OTHER else state.phase.name.lower()
        cells = (state.record.host, state.condition.value, place, f"{seconds[rank]:.1f} s", rate, phase)
        table.add_row(str(rank), *cells, style=style)
    is_long = any(seconds[rank] > LONG_SECONDS for rank in found.waits)
    return Group(table, *(found.sentences if is_long else []))
