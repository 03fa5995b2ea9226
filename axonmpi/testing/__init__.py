"""Testing distributed code: run functions on mock ranks, launch `mpirun`, assert on all ranks.

    run_ranks(4, fn)            fn(world) on four threads, results in rank order
    launch(4, "script.py")      a whole job under mpirun, with its exit code, output and time
    parallel_assert(condition)  fails on all ranks if it fails on one

The pytest plugin (`@pytest.mark.ranks`, fixture `world`) is there as soon as the package is installed.
"""

from .assertions import parallel_assert
from .launcher import LaunchResult, launch
from .mock_ranks import run_ranks

__all__ = ["LaunchResult", "launch", "parallel_assert", "run_ranks"]
