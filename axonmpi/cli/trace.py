"""`axonmpi trace`: a trace of all ranks as a summary, a file for Perfetto, and a picture.

    axonmpi trace runs/trace                        prints the summary, writes runs/trace/trace.json
    axonmpi trace runs/trace --output trace.png     draws the end of it, too

The first line names the rank or node that the others wait for. It works for a job that was killed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..tracing.arrivals import waits_of
from ..tracing.clocks import align
from ..tracing.merge import merge
from ..tracing.picture import draw
from ..tracing.rank_trace import read_traces
from .arguments import file_to_write, parse_arguments
from .output import print_on_first_rank, refuse

_PROGRAM = "axonmpi trace"


def main(argv: Sequence[str]) -> int:
    """Summarise a trace; local, no MPI is started.

    Returns:
        0; 2 if the folder has no trace, or a damaged one.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Say where the time of all ranks went, from the folder of a trace.",
        epilog="FOLDER/trace.json can be opened at ui.perfetto.dev. Times are in seconds.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of AXONMPI_TRACE, --trace or axonmpi.trace")
    picture = partial(file_to_write, endings=(".png", ".svg"))
    parser.add_argument(
        "--output", type=picture, metavar="FILE", help="draw the end of it into FILE.png or FILE.svg"
    )
    options = parse_arguments(parser, argv)
    try:
        print_on_first_rank(str(merge(options.folder)))
        if options.output is not None:
            traces, _ = align(read_traces(options.folder))
            draw(traces, waits_of(traces), options.output)
    except (ValueError, OSError) as error:
        return refuse(_PROGRAM, str(error))
    return 0
