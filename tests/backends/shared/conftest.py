"""What tests of shared memory share: pages, and whole jobs."""

import math
import mmap
import textwrap

import pytest

from axonmpi.backends.shared.segment import PAGE, Segment
from axonmpi.testing import launch

PRELUDE = """
import os, resource, warnings
import torch
import axonmpi as ax

world = ax.init_process_group()
group = world.default_group
"""


@pytest.fixture
def near_caches(monkeypatch):
    """Let groups be as where caches are close together, wherever the ranks happen to run."""
    monkeypatch.setattr("axonmpi.backends.connect.SLOW_LINE_SECONDS", math.inf)


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
def job():
    """Return a function that runs code to its end on n ranks that have made a world."""

    def run(n, code, **env):
        script = PRELUDE + textwrap.dedent(code) + "print('done')"
        result = launch(n, script, timeout=120, env={"OMP_NUM_THREADS": "1", **env})
        assert not result.timed_out, result.stdout + result.stderr
        assert result.leftover == ()
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("done") == n
        assert result.stderr == ""

    return run
