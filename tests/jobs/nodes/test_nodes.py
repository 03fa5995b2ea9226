"""Ranks on several nodes: what MPI's shared-memory split sees, results, and bytes on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import TESTS
from helpers.nodes import Nodes, Placement

FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_places_traffic_and_sharded_training(nodes: Nodes) -> None:
    assert nodes.run((2, 2), str(FOLDER / "job.py"), timeout=120).count("done") == 4


@pytest.mark.parametrize(
    ("ranks", "placement", "places"),
    [
        pytest.param((1, 1, 1, 1), "block", [0, 1, 2, 3], marks=pytest.mark.slow),
        ((2, 2), "round robin", [0, 1, 0, 1]),
    ],
)
def test_training_wherever_ranks_are(
    nodes: Nodes, ranks: tuple[int, ...], placement: Placement, places: list[int]
) -> None:
    printed = nodes.run(ranks, str(FOLDER / "strategies.py"), timeout=120, placement=placement)
    assert f"done on nodes {places}\n" in printed


def test_mismatches_raise_on_all_ranks_and_touch_no_data(nodes: Nodes) -> None:
    printed = nodes.run((1, 2), str(FOLDER / "mismatches.py"), "--calls", "60", timeout=120)
    assert "ranks on nodes [0, 1, 1]: 41 calls were right, 19 mismatches raised on all\n" in printed


@pytest.mark.slow
def test_the_conformance_suite_passes_on_nodes_of_different_size(nodes: Nodes) -> None:
    tests = str(TESTS / "conformance")
    printed = nodes.run((1, 2), "-m", "pytest", "-q", "-k", "bits or mismatch", tests, timeout=240)
    assert " passed" in printed, printed
    assert "failed" not in printed, printed
