"""Some of the faults of `tests/jobs/run faults`: each job ends in time, and names culprit and cause."""

from __future__ import annotations

import os

import pytest
from helpers import TESTS
from helpers.nodes import Nodes
from jobs.faults.injection import inject
from jobs.faults.table import FAULTS, Fault

QUICK = [fault for fault in FAULTS if fault.quick]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.what)
def test_a_fault_ends_the_job(fault: Fault, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    outcome = inject(fault, fault.places[-1], nodes)
    assert outcome.problems == (), outcome.output
