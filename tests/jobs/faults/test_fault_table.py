"""Some of the faults of `tests/jobs/run faults`: each job ends in time, and names culprit and cause."""

from dataclasses import replace

import pytest
from helpers.limits import limit
from helpers.nodes import Nodes
from jobs.faults.injection import inject
from jobs.faults.table import FAULTS, Fault

QUICK = [fault for fault in FAULTS if fault.quick]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.what)
def test_a_fault_ends_the_job(fault: Fault, nodes: Nodes) -> None:
    """An ended rank is found by its neighbours, a dead launcher by all ranks, an endless loop by the time limit."""
    env = {name: str(limit(2)) for name in fault.env}  # AXONMPI_TIMEOUT, which the start must not exceed
    outcome = inject(replace(fault, seconds=limit(fault.seconds), env=env), fault.places[-1], nodes)
    assert outcome.problems == (), outcome.output
