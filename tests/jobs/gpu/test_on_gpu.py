"""The checks of a GPU as tests: on a GPU where there is one, and on the CPU, for mistakes of their own."""

from __future__ import annotations

import pytest
from jobs.gpu.on_gpu import conformance, ordering, parallelisms, training
from jobs.gpu.on_gpu.check import Check

import axonmpi as ax
from axonmpi.backends import LocalBackend
from axonmpi.launch.topology import Topology

ON_GPU = [*conformance.CHECKS, *ordering.CHECKS, *parallelisms.CHECKS, *training.CHECKS]
ON_CPU = [*conformance.CHECKS, *ordering.CHECKS, *parallelisms.CHECKS, training.CHECKS[0]]


@pytest.fixture(scope="module")
def gpu_world():
    """Return a world of one rank, whose tensors go by NCCL."""
    world = ax.World(ax.NcclBackend.over(LocalBackend(), 0), Topology.of([0], 0))
    yield world
    world.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("check", ON_GPU, ids=lambda check: check.name)
def test_on_a_gpu(gpu_world, check: Check) -> None:
    with gpu_world.activate():
        check.run(gpu_world, {})


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("check", ON_CPU, ids=lambda check: check.name)
def test_the_checks_themselves(world, check: Check) -> None:
    check.run(world, {})
