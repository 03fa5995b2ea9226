"""`axonmpi top`: where the ranks of a job are, live.

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

from ..observe.board import Condition, RankPage
from ..observe.diagnosis import diagnose
from ..observe.jobs import find_job
from ..observe.state import RankState, read_states
from . import parse_arguments, refuse

__all__ = ["main"]

LONG_SECONDS = 5.0
"""How long ranks may wait before it is said for whom."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show the ranks of a job until it ends; local.

    Returns:
        0, or 2 if there is no such job.
    """
    parser = argparse.ArgumentParser(prog="axonmpi top", description="Show where the ranks of a job are, live.")
    parser.add_argument("job", nargs="?", default="", metavar="JOB|PID", help="default: the job that runs here")
    parser.add_argument("--interval", type=_positive_seconds, default=0.5, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once and end")
    options = parse_arguments(parser, argv)
    try:
        pages = find_job(options.job)
    except LookupError as error:
        return refuse("axonmpi top", str(error))
    console = Console()
    if options.once:
        console.print(screen(pages, read_states(pages), {}))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        rates: dict[int, float] = {}
        before = read_states(pages)
        while any(page.condition() is not Condition.GONE for page in pages):
            live.update(screen(pages, before, rates), refresh=True)
            begun = time.monotonic()
            time.sleep(options.interval)
            states = read_states(pages)
            rates = _rates(before, states, time.monotonic() - begun)
            before = states
        live.update(screen(pages, before, rates), refresh=True)
    return 0


def _positive_seconds(text: str) -> float:
    """Read an option's value, a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _rates(before: Sequence[RankState], states: Sequence[RankState], seconds: float) -> dict[int, float]:
    """Return how many operations a second each rank has begun between two looks."""
    return {
        state.rank: (state.number - earlier.number) / seconds for earlier, state in zip(before, states, strict=True)
    }


def screen(pages: Sequence[RankPage], states: Sequence[RankState], rates: Mapping[int, float]) -> Group:
    """Return what is shown of one look; local.

    Args:
        pages: Of the ranks of the job.
        states: Where they are.
        rates: Operations a second of each rank, where they are known.
    """
    table = Table(title=f"job {pages[0].job}: {pages[0].identity['program']}", title_justify="left", box=None)
    for name in ("rank", "node", "process", "operation", "for", "calls/s", "phase"):
        table.add_column(name, justify="right" if name in ("rank", "for", "calls/s") else "left")
    found = diagnose(states, pages[0].size)
    for state in states:
        lives = state.condition == Condition.LIVES.value
        style = "red" if not lives else "yellow" if state.rank in found.behind and _is_slow(state) else ""
        rate = f"{rates[state.rank]:,.0f}" if state.rank in rates else ""
        place = state.operation or "outside of collectives"
        cells = (state.host, state.condition, place, f"{state.seconds:.1f} s", rate, state.phase)
        table.add_row(str(state.rank), *cells, style=style)
    waiting = [found.states[rank] for rank in found.waits]
    said = found.sentences if any(map(_is_slow, waiting)) else []
    return Group(table, *said)


def _is_slow(state: RankState) -> bool:
    return state.seconds > LONG_SECONDS
