"""`axonmpi doctor`: a report of the installation and the launch, with a remedy for each thing that is wrong.

    axonmpi doctor                     is everything installed, and which mpirun belongs to it?
    mpirun -n 4 axonmpi doctor         does this launcher start one job of four ranks, on which nodes and cores, do
                                       they share memory, how fast is it, and which GPU does each rank use?

`report.py` assembles the report; `findings.py` has its lines. Each other file adds the lines of one subject. It
imports neither the trainer nor any package that only the trainer needs.
"""

from .report import main

__all__ = ["main"]
