"""Some of the faults of `tests/faults/run`: each job ends in time, and names culprit and cause."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.nodes import Nodes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from injection import inject  # noqa: E402
from table import FAULTS, Fault  # noqa: E402

QUICK = [fault for fault in FAULTS if fault.quick]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.what)
def test_a_fault_ends_the_job(fault: Fault, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    outcome = inject(fault, fault.places[-1], nodes)
    assert outcome.problems == (), outcome.output
