"""Ranks on two nodes: what MPI's shared-memory split sees, results, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import Nodes

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    obstacle = Nodes.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with Nodes(2) as both:
        yield both


def test_places_traffic_and_sharded_training(nodes: Nodes) -> None:
    assert nodes.run((2, 2), str(FOLDER / "job.py"), timeout=120).count("done") == 4


def test_the_conformance_suite_passes_on_nodes_of_different_size(nodes: Nodes) -> None:
    tests = str(FOLDER.parent / "conformance")
    printed = nodes.run((1, 2), "-m", "pytest", "-q", "-k", "bits or mismatch", tests, timeout=240)
    assert " passed" in printed, printed
    assert "failed" not in printed, printed
