"""Ranks on two nodes: what MPI's shared-memory split sees, results, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import TwoNodes

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    obstacle = TwoNodes.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with TwoNodes() as both:
        yield both


def test_places_traffic_and_sharded_training(nodes: TwoNodes) -> None:
    assert nodes.run((2, 2), str(FOLDER / "job.py"), timeout=120).count("done") == 4


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)], ids=str)
def test_the_conformance_suite_passes(nodes: TwoNodes, ranks: tuple[int, int]) -> None:
    tests = str(FOLDER.parent / "conformance")
    printed = nodes.run(ranks, "-m", "pytest", "-q", "-k", "bits or mismatch", tests, timeout=240)
    assert " passed" in printed, printed
    assert "failed" not in printed, printed


def test_a_job_that_fails_is_an_error_with_its_output(nodes: TwoNodes) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit code .*no such file"):
        nodes.run(
            (1, 1), "-c", "import axonmpi as ax; ax.init_process_group(); raise OSError('no such file')", timeout=60
        )
    # The nodes are still of use afterwards.
    assert "both" in nodes.run((1, 1), "-c", "print('both')", timeout=60)
