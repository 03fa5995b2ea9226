"""Jobs in which the first rank leaves its block by an error, or ends the program there."""

import pytest
from helpers.limits import limit

from axonmpi.testing import launch

PROGRAM = """
import sys
import axonmpi as ax
world = ax.init_process_group()
with ax.main_process_first():
    if world.rank == 0:
        ACTION
    print(f"rank {world.rank} runs the block")
"""


@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        ("raise OSError('no network')", 1, "OSError: no network"),
    ],
)
def test_a_job_whose_first_rank_fails_ends(action, code, said) -> None:
    result = launch(2, PROGRAM.replace("ACTION", action), timeout=limit(60))
    output = result.stdout + result.stderr
    assert (result.returncode != 0, "runs the block" in output, said in output) == (True, False, True), output
    assert code != 3 or "Traceback" not in output
