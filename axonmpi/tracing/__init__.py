"""Traces: the time of each rank in computation, waiting and moving, on one clock for all nodes.

`trace.py` begins and ends a trace: each rank then keeps its operations and phases in a file
(`record/trace_file.py`). The other files read those of all ranks: `rank_trace.py` one of them, `clocks.py` aligns
the clocks of nodes, `arrivals.py` tells waiting from moving, `summary.py` names the rank that the others wait for,
and `merge.py` writes one file for Perfetto. Read `trace.py` and `summary.py` first. The package imports `backends`
and packages below.
"""

from .summary import Summary
from .trace import Trace

__all__ = ["Summary", "Trace"]
