"""`tests/jobs/run gpu` where there is no GPU, and what it makes of processes that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.limits import limit
from jobs.gpu.command import TESTS, Part, Report, Runner, parts_for, run_part, take_over

from axonmpi.utils.waiting import network_backoff, wait_until

ALL_THERE = {"gpus": ["A GPU"], "nccl": [2, 30, 1], "mpirun": "/usr/bin/mpirun", "packages": {}}
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(limit(60), tmp_path)


@WITHOUT_GPU
def test_without_a_gpu_all_is_skipped_with_a_reason(tmp_path: Path) -> None:
    """Also where little more than torch and numpy is installed."""
    for name in ("hypothesis", "mpi4py", "pytest", "tyro"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is hidden')")
    command = [sys.executable, TESTS / "jobs" / "run", "gpu", "--out", "all.json", "--seconds", str(limit(60))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "There is no GPU here: nothing of NCCL or CUDA was checked." in ended.stdout
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["summary"]["skipped"] == len(found["checks"]) > 5
    assert all("no GPU" in check["reason"] for check in found["checks"])
    assert found["machine"]["torch"] == torch.__version__


# ---- what is chosen ---------------------------------------------------------------------------------------------


def chosen(**changes: object) -> dict[str, tuple[str, str]]:
    """Return the parts for a machine: how the ranks are connected, and why a part is skipped."""
    return {part.name: (part.way, part.reason) for part in parts_for({**ALL_THERE, **changes}, "cuda")}


def test_parts_for_what_a_machine_has() -> None:
    alone = {"1 rank": ("nccl", ""), "1 rank, cost": ("nccl+host", ""), "1 rank, with its CPU": ("nccl+host", "")}
    two, four = "2 ranks on a GPU", "4 ranks on a GPU"
    assert chosen() == {**alone, two: ("mpi+nccl", ""), four: ("mpi+nccl", "")}
    too_old = ("mpi+nccl", "several ranks on one GPU need NCCL 2.30 or newer, not 2.28.9")
    assert chosen(nccl=[2, 28, 9]) == {**alone, two: too_old, four: too_old}
    no_mpi = ("mpi+nccl", "needs MPI: mpi4py is not installed.")
    by_nccl = {two: ("nccl", ""), f"{two}, by MPI": no_mpi, four: ("nccl", ""), f"{four}, by MPI": no_mpi}
    assert chosen(mpirun=None, mpirun_missing="mpi4py is not installed.\nMore") == {**alone, **by_nccl}
    without_nccl = chosen(nccl=None, nccl_missing="nccl4py cannot be imported\nInstall it")
    assert without_nccl.pop("1 rank, without NCCL") == ("no nccl", "")
    assert {reason for _, reason in without_nccl.values()} == {"nccl4py cannot be imported"}


# ---- what processes come to -------------------------------------------------------------------------------------


def outcomes_of(part: Part, runner: Runner) -> list[tuple[str, str, str]]:
    report = Report()
    run_part(part, runner, ALL_THERE, report)
    return [(check["name"], check["outcome"], check["reason"]) for check in report.checks]


def test_checks_are_reported_with_what_they_came_to(runner: Runner) -> None:
    part = Part("here", "cpu", limit(20), ["ordering/waiting"])
    assert outcomes_of(part, runner) == [("here: ordering/waiting", "passed", "")]


@WITHOUT_GPU
def test_ranks_that_cannot_connect_say_why(runner: Runner) -> None:
    ((name, outcome, reason),) = outcomes_of(Part("there", "nccl", limit(20), ranks=2), runner)
    assert (name, outcome) == ("there: start or end", "failed")
    assert "NcclError" in reason


def test_a_process_that_ends_early_names_the_check(tmp_path: Path) -> None:
    out, report = tmp_path / "out.jsonl", Report()
    passed = {"name": "first", "outcome": "passed", "reason": "", "seconds": 1.0, "figures": {"speed": 2}}
    out.write_text("\n".join(map(json.dumps, [{"begun": "first"}, passed, {"begun": "second"}])))
    take_over(Part("part", "nccl", 1.0), out, "exit code -11\nsegmentation fault", report)
    outcomes = [(check["name"], check["outcome"]) for check in report.checks]
    assert outcomes == [("part: first", "passed"), ("part: second", "failed")]
    assert report.figures == {"part": {"speed": 2}}


def test_a_command_that_fails_says_why(runner: Runner) -> None:
    problem, printed = runner.run(["sh", "-c", "echo first; echo last; exit 3"], limit(10))
    assert (problem, printed) == ("exit code 3: last\nfirst\nlast\n", "first\nlast\n")


def test_what_takes_too_long_is_ended_with_all_it_started(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.gpu.command.LEAST_SECONDS", 0.5)
    problem, printed = runner.run(["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    assert problem.startswith("took too long")
    assert wait_until(lambda: is_ended(int(printed)), network_backoff(), limit(10))


def is_ended(process: int) -> bool:
    """Return True for a process that is gone, or dead and not yet buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_when_the_time_is_up_nothing_is_started(tmp_path: Path) -> None:
    assert outcomes_of(Part("late", "cpu", 60), Runner(1, tmp_path)) == [("late", "skipped", "the time was up")]
