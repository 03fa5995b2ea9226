"""A pretended world: a short form of `tests/jobs/run pretended`."""

import subprocess
import sys

from helpers import TESTS
from helpers.compare import assert_said
from helpers.limits import limit

from axonmpi.launch.launcher_variables import without_launcher_variables


def test_a_world_of_many_ranks_is_set_up_and_calls_all_that_is_measured() -> None:
    unlimited = ("--ratio=1000", "--seconds=1000")  # how long that takes says nothing here
    command = [sys.executable, str(TESTS / "jobs/run"), "pretended", "--ranks=512", "--calls=5", *unlimited]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(60), env=without_launcher_variables(), check=False
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert_said(result.stdout, "512 ranks", "reduce_scatter_into")
