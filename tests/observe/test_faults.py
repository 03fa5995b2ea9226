"""Jobs in which a rank does not come: they end soon, not with 0, and say which it is and where the others wait.

`tests/faults/run` has many more of them, under both MPIs and on several nodes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axonmpi.testing import launch

JOB = Path(__file__).with_name("faulty_job.py")
WAITS = re.escape("rank 0 waits in all_reduce(float32 [3], SUM)")


@pytest.mark.parametrize(
    ("fault", "settings", "said"),
    [
        ("stopped", {}, rf"CollectiveTimeoutError: rank 1 on \S+ is stopped while {WAITS}"),
        ("exited 256", {}, rf"rank 1 on \S+ has come to the end of its program while {WAITS}"),
        (
            "circle",
            {},
            r"look at ranks 0, 1 first: rank 0 waits for rank 1 in all_reduce\(.*; rank 1 waits for rank 0",
        ),
        ("loops", {"AXONMPI_TIMEOUT": "6"}, r"rank 0 has waited 6 s for rank 1 in all_reduce"),
    ],
)
def test_a_job_with_a_rank_that_does_not_come_ends(fault, settings, said) -> None:
    ended = launch(2, JOB, fault, timeout=60, env={"OMP_NUM_THREADS": "1", **settings})
    assert not ended.timed_out, ended.stderr
    assert ended.returncode != 0
    assert ended.leftover == ()
    assert re.search(said, ended.stderr), ended.stderr
    assert ended.stderr.count("the job is ended\n") == 1
    if fault == "loops":
        assert "rank 0 waits for rank 1 since 1 s, and the job is ended after 6 s" in ended.stderr
        assert re.search(r"stack of rank 1:.*in loop", ended.stderr, re.DOTALL), ended.stderr


def test_a_slow_rank_is_no_fault() -> None:
    """All wait for it much longer than for a rank that is stopped."""
    ended = launch(2, JOB, "slow", timeout=60, env={"OMP_NUM_THREADS": "1"})
    assert (ended.returncode, ended.stderr) == (0, "")
