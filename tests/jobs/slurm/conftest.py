"""The cluster that tests of this folder submit jobs to."""

import os
from collections.abc import Iterator

import pytest
from jobs.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return a Slurm cluster on two nodes, which ends with the session."""
    if "AXONMPI_TEST_SLURM" not in os.environ:
        pytest.skip("tests/jobs/run slurm starts a Slurm cluster for these tests, which takes minutes")
    if obstacle := Cluster.obstacle():
        pytest.skip(obstacle)
    with Cluster() as made:
        yield made


@pytest.fixture
def tidy(cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster, on which nothing may be left when the test ends."""
    yield cluster
    cluster.cancel_all()  # there are some where the test has failed
    cluster.check_tidy()
