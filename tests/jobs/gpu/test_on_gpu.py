"""The checks of `tests/jobs/run gpu` on the CPU, for mistakes of their own."""

import pytest
from jobs.gpu.on_gpu import Check, conformance, ordering, parallelisms, training

import axonmpi as ax

CHECKS = [*conformance.CHECKS, *ordering.CHECKS, *parallelisms.CHECKS, training.CHECKS[0]]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_checks_themselves(world: ax.World, check: Check) -> None:
    check.run(world, {})
