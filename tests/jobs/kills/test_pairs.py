"""One pair of jobs that save to one path; `tests/jobs/run kills --pairs 60` has more."""

import random
from pathlib import Path

import pytest
from jobs.kills.command import kill_one_of_two


@pytest.mark.parametrize("kind", ["path", "folder"])
def test_the_second_job_is_refused_until_the_first_has_ended(kind: str, seed: int, tmp_path: Path) -> None:
    assert kill_one_of_two(tmp_path / "run", kind, 1, random.Random(seed)) > 0
