"""What the tests of shared memory share: the values and references of the conformance tests, and whole jobs."""

import mmap
import sys
import textwrap
from pathlib import Path

import pytest

from axonmpi.backends.shared_memory import PAGE, Segment
from axonmpi.testing import launch

sys.path.append(str(Path(__file__).resolve().parents[1] / "conformance"))

PRELUDE = """
import gc, os, resource, sys, warnings
import torch
import axonmpi as ax

world = ax.init_process_group()
group = world.default_group
"""


@pytest.fixture
def pages(rank_count):
    """Return a function that makes a segment of one page for each rank: of threads, or of processes; collective."""
    memory = mmap.mmap(-1, rank_count * PAGE)

    def make(group):
        if group.backend.name == "mock":
            return Segment(memory, PAGE, group.rank, group.size)
        segment = Segment.create(group.backend.mpi_comm, PAGE)
        assert isinstance(segment, Segment), segment
        assert segment.populate(0, PAGE) is None
        return segment

    return make


@pytest.fixture
def real_group(world):
    """Return a function that makes a group of all ranks under MPI; skips the test on mock ranks."""

    def make(of):
        if of.default_group.backend.name == "mock":
            pytest.skip("about memory that processes share: needs an mpirun")
        made = of.new_group(range(of.size))
        assert made.backend.path == "node"
        return made

    return make


@pytest.fixture
def job():
    """Return a function that runs code on n ranks that have made a world, and returns what rank 0 printed."""

    def run(n, code, **env):
        script = PRELUDE + textwrap.dedent(code)
        result = launch(n, script, timeout=120, env={"OMP_NUM_THREADS": "1", **env})
        assert not result.timed_out, result.stdout + result.stderr
        assert result.leftover == ()
        return result

    return run
