"""Tests of distributed code: functions on mock ranks, jobs under `mpirun`, assertions on all ranks.

    run_ranks(4, fn)            fn(world) on four threads, results in rank order
    launch(4, "script.py")      a job under mpirun, with its exit code, output and time
    parallel_assert(condition)  fails on all ranks if it fails on one

Installing the package also installs the pytest plugin (`@pytest.mark.ranks`, fixture `world`), which runs one test
on threads under `pytest` and on processes under `mpirun`. Read first `mock_ranks.py` and `plugin/__init__.py`. It
imports `comm` and the packages below.
"""

from .assertions import parallel_assert
from .launcher import LaunchResult, launch
from .mock_ranks import run_ranks

__all__ = ["LaunchResult", "launch", "parallel_assert", "run_ranks"]
