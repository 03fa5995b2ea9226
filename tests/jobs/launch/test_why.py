"""A job that hangs, looked at from outside: `axonmpi why`, `axonmpi top`, and dumps that torchfrtrace reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.flight_recorder import fr_trace

from axonmpi import cli
from axonmpi.cli.why import as_json, as_text, examine
from axonmpi.observe.board import RankPage, job_names, pages_of
from axonmpi.observe.judgement import look_at
from axonmpi.observe.nodes import tell_others
from axonmpi.testing import launch
from axonmpi.utils.waiting import Backoff, wait_until

PROGRAMS = Path(__file__).parents[1] / "faults" / "programs.py"
START_SECONDS = 60.0


@dataclass
class Hanging:
    """A job of three ranks in which a fault has happened."""

    pages: list[RankPage]

    def why(self, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
        code = cli.main(["why", self.pages[0].job, *options])
        return code, capsys.readouterr().out


@contextlib.contextmanager
def hanging(fault: str, folder: Path) -> Iterator[Hanging]:
    """Start a job with a fault, and end it afterwards."""
    token, mark = uuid.uuid4().hex, folder / "mark"
    env = {"FAULT_MARK": str(mark), "OMP_NUM_THREADS": "1"}
    job = threading.Thread(target=launch, args=(3, PROGRAMS, fault, token), kwargs={"timeout": 90, "env": env})
    job.start()
    pages: list[RankPage] = []
    try:
        assert wait_until(lambda: mark.exists() or not job.is_alive(), Backoff(0, 0.05), START_SECONDS)
        found = [pages for name in job_names() if token in (pages := pages_of(name))[0].identity["program"]]
        assert len(found) == 1
        pages = found[0]

        def others_wait() -> bool:
            return all(page.current() for page in pages if page.rank != 1)

        assert wait_until(others_wait, Backoff(0, 0.05), START_SECONDS)
        yield Hanging(pages)
    finally:
        for page in pages:
            with contextlib.suppress(ProcessLookupError):
                os.kill(page.pid, signal.SIGKILL)
        job.join()


def missing_by_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the lines of torchfrtrace about missing ranks."""
    caplog.clear()
    fr_trace.main([str(folder)])
    return {message for message in caplog.messages if message.startswith("missing ranks")}


@pytest.mark.slow
def test_a_rank_that_never_comes(tmp_path, capsys, caplog):
    with hanging("loops", tmp_path) as job:
        code, said = job.why(capsys)
        assert code == 1
        assert "ranks 0, 2: all_reduce(float32 [1000], SUM), collective" in said
        assert "at programs.py:" in said
        assert "Ranks 0, 2 wait for rank 1 in all_reduce" in said
        assert "Stack of rank 1, innermost frame first:" in said
        assert " in loops" in said.partition("Stack of rank 1")[2]

        told = tmp_path / "told"
        tell_others(told, look_at(job.pages[1:2]), [])
        (node,) = told.iterdir()
        node.rename(f"{node}-other")  # as another node would have written it
        seen_here = examine(job.pages[::2], stacks=False)
        assert (seen_here.diagnosis.behind, seen_here.diagnosis.unknown) == ((), (1,))
        assert "Not known here, as on other nodes: rank 1" in as_text(seen_here)
        data = as_json(examine(job.pages[::2], stacks=False, folder=told))
        assert (data["behind"], data["unknown"], data["hangs"], data["stacks"]) == ((1,), (), True, {})

        assert cli.main(["top", str(job.pages[1].pid), "--once"]) == 0
        shown = capsys.readouterr().out
        assert "outside of collectives" in shown
        assert "all_reduce" in shown

        code, said = job.why(capsys, f"--dump={tmp_path / 'trace'}")
        assert (code, said.startswith("3 files in ")) == (0, True)
        assert missing_by_torch(tmp_path / "trace", caplog) == {"missing ranks: {1}"}


@pytest.mark.slow
def test_two_groups_in_another_order(tmp_path, capsys, caplog):
    with hanging("wrong_order", tmp_path) as job:
        assert wait_until(lambda: all(page.current() for page in job.pages), Backoff(0, 0.05), START_SECONDS)
        code, said = job.why(capsys, "--json", "--no-stacks")  # before the watchdog ends the job
        data = json.loads(said)
        assert (code, data["behind"], data["is_circle"]) == (1, [1], True)
        assert [each["ranks"] for each in data["classes"]] == [[0, 2], [1]]
        assert data["classes"][0]["place"].endswith("collective 1 of the group of ranks 0 to 2, number 2 of 3 such")
        job.why(capsys, f"--dump={tmp_path / 'trace'}")
        assert missing_by_torch(tmp_path / "trace", caplog) == {"missing ranks: {1}", "missing ranks: {0, 2}"}


def test_a_job_that_fails_leaves_pages_and_dumps(tmp_path, capsys, caplog):
    """Dumps are written by the watchdog when it ends the job: torchfrtrace names the same rank."""
    dumps, token = tmp_path / "dumps", uuid.uuid4().hex
    env = {"FAULT_MARK": str(tmp_path / "mark"), "OMP_NUM_THREADS": "1", "AXONMPI_DUMP": str(dumps)}
    job = launch(3, PROGRAMS, "stopped", token, timeout=60, env=env)
    assert job.returncode != 0
    assert not job.timed_out
    assert "rank 1 on" in job.stderr
    (page,) = [
        page for name in job_names() for page in pages_of(name) if page.rank == 1 and token in str(page.identity)
    ]
    assert cli.main(["why", str(page.pid), "--no-stacks"]) == 0
    said = capsys.readouterr().out
    assert f"process {page.pid} is rank 1\n" in said
    assert "The job has ended: this is where its ranks were." in said
    assert cli.main(["top", str(page.pid)]) == 0
    assert capsys.readouterr().out.count("has ended") == 3
    assert missing_by_torch(dumps, caplog) == {"missing ranks: {1}"}


def test_no_such_job(capsys):
    assert cli.main(["why", "nosuchjob"]) == 2
    said = capsys.readouterr().err
    assert "axonmpi why: error: " in said
    assert cli.main(["top", "nosuchjob"]) == 2
