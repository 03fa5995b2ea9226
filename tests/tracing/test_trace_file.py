"""Files of traces: bounded, readable after a kill, and without a word lost where the disk is full."""

import errno
import os

import pytest
from helpers.limits import limit

from axonmpi.cli import main
from axonmpi.record import Phase, describe, private_record, trace_file
from axonmpi.testing.launcher import launch
from axonmpi.tracing.rank_trace import read_traces

IDENTITY = {"trace": "a", "rank": 0, "size": 1, "node": 0, "wall_clock": 0}
ROWS = 128
PROGRAM = """
import os, signal
import torch
import axonmpi as ax
world = ax.init_process_group()
for _ in range(50):
    ax.all_reduce(torch.ones(4))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()
"""


@pytest.fixture
def small(monkeypatch):
    """Chunks of a few entries."""
    monkeypatch.setattr(trace_file, "CHUNK_ENTRIES", ROWS)
    monkeypatch.setattr(trace_file, "CHUNK_BYTES", ROWS * 160)
    monkeypatch.setattr(trace_file, "MOST_CHUNKS", 3)


def test_a_trace_keeps_the_latest_operations(tmp_path, small) -> None:
    record = private_record()
    log = record.join(0, 1, 77)
    record.begin_trace(tmp_path, IDENTITY)
    for _ in range(2000):
        log.leave(log.enter(describe("all_reduce", nbytes=4)))
    record.end_trace()
    log.leave(log.enter(describe("all_reduce", nbytes=4)))  # no longer traced
    calls = read_traces(tmp_path)[0].operations["call"].tolist()
    assert calls == list(range(calls[0], 2001))
    assert 2 * ROWS - 10 < len(calls) <= 3 * ROWS
    assert (tmp_path / "rank-0.trace").stat().st_size == trace_file.PAGE + 3 * ROWS * 160


def test_a_full_disk_ends_the_trace_with_a_warning(tmp_path, small, monkeypatch) -> None:
    record = private_record()
    log = record.join(0, 1, 77)
    record.begin_trace(tmp_path, IDENTITY)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)

    def call() -> None:
        for _ in range(ROWS + 10):
            log.leave(log.enter(describe("barrier")))

    with pytest.warns(RuntimeWarning, match="the trace of this rank ends here: .*No space left"):
        call()
    assert log.count == ROWS + 10
    record.end_trace()
    assert len(read_traces(tmp_path)[0].operations) == ROWS - 1  # and the entry of the group


def test_an_unfinished_operation_is_kept_once_it_ends(tmp_path, small) -> None:
    record = private_record()
    log = record.join(0, 1, 77)
    record.begin_trace(tmp_path, IDENTITY)
    slow = log.enter(describe("broadcast"))
    for _ in range(60):
        log.leave(log.enter(describe("barrier")))
    log.fail(slow)
    record.end_trace()
    (slow_one,) = [each for each in read_traces(tmp_path)[0].operations if each["name"] == b"broadcast"]
    assert slow_one["failed"] == 1
    assert slow_one["left"] > slow_one["started"]


def test_phases_have_the_time_that_their_thread_ran(tmp_path) -> None:
    record = private_record()
    record.begin_trace(tmp_path, IDENTITY)
    assert record.trace is not None
    record.trace.enter_phase(Phase.FORWARD, "F1.0")
    while os.times().user < 0:
        pass
    record.trace.enter_phase(Phase.OTHER, "")
    record.end_trace()
    (span,) = read_traces(tmp_path)[0].spans
    assert (span["name"], span["dtype"]) == (b"forward", b"F1.0")
    assert 0 <= span["nbytes"] <= span["left"] - span["started"] + 1_000_000


def test_a_job_that_is_killed_leaves_its_trace(tmp_path, capsys) -> None:
    folder = tmp_path / "trace"
    result = launch(2, "-c", PROGRAM, timeout=limit(60), env={"AXONMPI_TRACE": str(folder)})
    assert result.returncode != 0
    assert main(["trace", str(folder), "--output", str(folder / "picture.png")]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert (folder / "picture.png").stat().st_size > 1000
    for trace in read_traces(folder):
        assert (trace.operations["name"] == b"all_reduce").sum() >= 50


def test_what_is_no_trace_is_refused(tmp_path, capsys) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    (tmp_path / "rank-0.trace").write_bytes(b"no trace")
    assert main(["trace", str(tmp_path)]) == 2
    for rank, job in enumerate("ab"):
        record = private_record()
        record.begin_trace(tmp_path, {**IDENTITY, "rank": rank, "trace": job})
        record.end_trace()
    assert main(["trace", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    for text in ("expected the files rank-0.trace", "expected the trace of a rank, got b'no trace'", "files of 2"):
        assert text in errors
