"""A job that hangs, looked at from outside: `axonmpi why`, `axonmpi top`, and dumps that torchfrtrace reads."""

import json
import re
import signal
from pathlib import Path

import pytest
from helpers.compare import assert_said
from helpers.limits import limit
from jobs.faults.injection import PROGRAMS
from jobs.job import send, start_ranks, wait_for
from torch.distributed.flight_recorder import fr_trace

from axonmpi import cli
from axonmpi.cli import top
from axonmpi.cli import why as why_module
from axonmpi.cli.why import as_json, as_text, examine
from axonmpi.observe.shared_folder import write_states
from axonmpi.observe.waits import states_of
from axonmpi.record.reader import RankRecord, job_names, records_of


def records_with(processes: list[int]) -> list[RankRecord]:
    """Return the records of the job that some processes belong to."""
    every = map(records_of, job_names())
    return next((records for records in every if {record.pid for record in records} & set(processes)), [])


def missing_by_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the lines of torchfrtrace about missing ranks."""
    caplog.clear()
    fr_trace.main([str(folder)])
    return {message for message in caplog.messages if message.startswith("missing ranks")}


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return cli.main(["why", *arguments]), capsys.readouterr().out


def test_a_rank_that_never_comes(tmp_path, capsys, caplog, monkeypatch):
    """It computes for ever while the others wait; then it is stopped, and the watchdog ends the job."""
    dumps, mark = tmp_path / "dumps", tmp_path / "mark"
    with start_ranks(3, PROGRAMS, "loops", FAULT_MARK=str(mark), AXONMPI_DUMP=str(dumps)) as job:
        assert wait_for(lambda: mark.exists() or not job.is_running, limit(30)), job.output
        records = records_with(job.ranks())
        name, culprit = records[0].job, records[1].pid
        assert wait_for(lambda: examine(records, stacks=False).graph.behind == (1,), limit(30))

        code, said = why(capsys, name)
        waiting = (
            "ranks 0, 2: all_reduce(float32 [1000], SUM), collective",
            "Ranks 0, 2 wait for rank 1 in all_reduce",
        )
        assert_said(said, *waiting, "at programs.py:", "Stack of rank 1, innermost frame first:")
        assert (code, " in loop" in said.partition("Stack of rank 1")[2]) == (1, True)

        code, said = why(capsys, name, "--json", "--no-stacks")
        data = json.loads(said)
        assert (code, data["behind"], data["is_circle"]) == (1, [1], False)
        assert [each["ranks"] for each in data["classes"]] == [[0, 2], [1]]

        look_at_other_nodes(tmp_path / "told", records)

        assert cli.main(["top", str(culprit), "--once"]) == 0
        assert_said(capsys.readouterr().out, "outside of collectives", "all_reduce")

        code, said = why(capsys, str(culprit), "--no-stacks")
        assert (code, f"process {culprit} is rank 1\n" in said) == (1, True)

        code, said = why(capsys, name, f"--dump={tmp_path / 'trace'}")
        assert (code, said.startswith("3 files in ")) == (0, True)
        assert missing_by_torch(tmp_path / "trace", caplog) == {"missing ranks: {1}"}

        send(signal.SIGSTOP, [culprit])
        assert job.wait(limit(60)) != 0
        assert re.search(r"CollectiveTimeoutError: rank 1 on \S+ [^.;]*stopped", job.output), job.output

    # The next job of this user removes the records, and it may have begun; those that are open stay.
    for command in (why_module, top):
        monkeypatch.setattr(command, "find_job", lambda job: records)
    code, said = why(capsys, name, "--no-stacks")
    assert (code, "The job has ended: this is where its ranks were." in said) == (0, True)
    assert (cli.main(["top", name]), capsys.readouterr().out.count("has ended")) == (0, 3)
    assert missing_by_torch(dumps, caplog) == {"missing ranks: {1}"}


def look_at_other_nodes(folder: Path, records: list[RankRecord]) -> None:
    """Leave rank 1 out, as if it were on another node, which may tell about it in a folder."""
    write_states(folder, states_of(records[1:2]), [])
    (node,) = folder.iterdir()
    node.rename(f"{node}-other")
    seen_here = examine(records[::2], stacks=False)
    assert (seen_here.graph.behind, seen_here.graph.unknown) == ((), (1,))
    assert "Not known here, as on other nodes: rank 1" in as_text(seen_here)
    data = as_json(examine(records[::2], stacks=False, folder=folder))
    assert (data["behind"], data["unknown"], data["hangs"], data["stacks"]) == ((1,), (), True, {})


def test_no_such_job(capsys):
    codes = [cli.main([command, "nosuchjob"]) for command in ("why", "top")]
    assert (codes, "axonmpi why: error: " in capsys.readouterr().err) == ([2, 2], True)
