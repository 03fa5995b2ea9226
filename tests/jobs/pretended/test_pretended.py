"""A pretended world: a short form of `tests/jobs/run pretended`."""

from __future__ import annotations

from pathlib import Path

from helpers import TESTS

from axonmpi.testing import launch


def test_a_world_of_many_ranks_is_set_up_and_calls_all_that_is_measured() -> None:
    arguments = ("--ranks", 512, "--calls", 5, "--ratio", 1000)  # how long that takes says nothing here
    result = launch(
        2,
        Path(__file__).with_name("command.py"),
        *arguments,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "512 ranks" in result.stdout
    assert "reduce_scatter_into" in result.stdout
