"""`tests/jobs/run gpu` where there is no GPU, and what it makes of processes that fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

from axonmpi.utils.waiting import network_backoff, wait_until

RUN = Path(__file__).with_name("command.py")
ALL_THERE = {"gpus": ["A GPU"], "nccl": "2.30.1", "mpirun": "/usr/bin/mpirun", "packages": {}}


def loaded():
    """Import the command, whose file is no name of a module."""
    loader = SourceFileLoader("gpu_run", str(RUN))
    spec = importlib.util.spec_from_loader("gpu_run", loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module
    loader.exec_module(module)
    return module


run = loaded()


@pytest.fixture
def runner(tmp_path):
    return run.Runner(60, tmp_path, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_all_is_skipped_with_a_reason(tmp_path) -> None:
    command = [sys.executable, RUN, "--out", tmp_path / "all.json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "There is no GPU here: nothing of NCCL or CUDA was checked." in ended.stdout
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["summary"]["skipped"] == len(found["checks"]) > 5
    assert {check["outcome"] for check in found["checks"]} == {"skipped"}
    assert all("no GPU" in check["reason"] for check in found["checks"])
    assert found["machine"]["torch"] == torch.__version__


# ---- what is chosen ---------------------------------------------------------------------------------------------


def chosen(**changes: object) -> dict[str, str]:
    """Return the parts for a machine, each with the reason why it is skipped."""
    return {part.name: part.reason for part in run.parts_for({**ALL_THERE, **changes}, "cuda")}


def test_a_whole_machine_is_asked_for_everything() -> None:
    assert list(chosen().values()) == [""] * 5
    assert {part.way for part in run.parts_for(ALL_THERE, "cuda")} == {"nccl", "nccl+host", "mpi+nccl"}


def test_an_older_nccl_leaves_one_rank_a_gpu() -> None:
    reasons = chosen(nccl="2.28.9")
    assert [bool(reason) for reason in reasons.values()] == [False] * 3 + [True] * 2
    assert reasons["4 ranks on a GPU"] == "several ranks on one GPU need NCCL 2.30 or newer, not 2.28.9"


def test_without_mpi_ranks_meet_over_a_file() -> None:
    missing = {"mpirun": None, "mpirun_missing": "mpi4py is not installed.\nMore"}
    ways = {part.name: part.way for part in run.parts_for({**ALL_THERE, **missing}, "cuda")}
    assert ways["2 ranks on a GPU"] == "file"
    assert chosen(**missing)["2 ranks on a GPU"] == ""
    assert chosen(**missing)["2 ranks on a GPU, by MPI"] == "needs MPI: mpi4py is not installed."


def test_without_nccl_one_gpu_computes_without_communication() -> None:
    reasons = chosen(nccl=None, nccl_missing="nccl4py cannot be imported\nInstall it")
    assert reasons.pop("1 rank, without NCCL") == ""
    assert set(reasons.values()) == {"nccl4py cannot be imported"}


# ---- what processes come to -------------------------------------------------------------------------------------


def outcomes_of(part, runner) -> list[tuple[str, str, str]]:
    report = run.Report()
    run.run_part(part, runner, ALL_THERE, report)
    return [(check["name"], check["outcome"], check["reason"]) for check in report.checks]


def test_checks_are_reported_with_what_they_came_to(runner) -> None:
    ((name, outcome, _),) = outcomes_of(run.Part("here", "cpu", 60, ["ordering/waiting"]), runner)
    assert (name, outcome) == ("here: ordering/waiting", "passed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("way", "ranks"), [("nccl+host", 1), pytest.param("file", 2, marks=pytest.mark.slow)])
def test_ranks_that_cannot_connect_say_why(runner, way: str, ranks: int) -> None:
    ((name, outcome, reason),) = outcomes_of(run.Part("there", way, 20, ranks=ranks), runner)
    assert (name, outcome) == ("there: start or end", "failed")
    assert "NcclError" in reason


def test_a_process_that_ends_early_names_the_check(runner, tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    passed = {"name": "first", "outcome": "passed", "reason": "", "seconds": 1.0, "figures": {"speed": 2}}
    out.write_text("\n".join(map(json.dumps, [{"begun": "first"}, passed, {"begun": "second"}])))
    report = run.Report()
    run.take_over(run.Part("part", "nccl", 1.0), out, "exit code -11\nsegmentation fault", report)
    assert [(check["name"], check["outcome"]) for check in report.checks] == [
        ("part: first", "passed"),
        ("part: second", "failed"),
    ]
    assert report.figures == {"part": {"speed": 2}}


def test_what_takes_too_long_is_ended_with_all_it_started(runner, monkeypatch) -> None:
    monkeypatch.setattr(run, "LEAST_SECONDS", 1.0)
    program = "import subprocess; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    problem, printed = runner.run([[sys.executable, "-c", program]], 4.0)
    assert problem.startswith("took too long")
    assert wait_until(lambda: is_ended(int(printed)), network_backoff(), 10)


def is_ended(process: int) -> bool:
    """Say whether a process is gone, or dead and not yet buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_when_the_time_is_up_nothing_is_started(runner) -> None:
    late = run.Runner(1, runner.folder, None)
    assert outcomes_of(run.Part("late", "cpu", 60), late) == [("late", "skipped", "the time was up")]
