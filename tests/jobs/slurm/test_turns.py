"""Training in several turns: jobs that stop in time, go back into the queue, and go on as if nothing had been."""

import json
from pathlib import Path

import pytest
from jobs.slurm.cluster import Cluster, Job
from jobs.slurm.test_jobs import SMALL, TEMPLATES

STEPS = 200
MODEL = ["--sequence-length=64", "--layers=2", "--width=64", "--global-batch=32", "--evaluate-every=0"]
RUN = [*SMALL, *MODEL, f"--steps={STEPS}"]
ENDLESS = [*SMALL, *MODEL, "--steps=1000000"]
MEASURED = ("tokens_per_second", "communication", "seconds")
"""What is different in each run."""


def lines_of(folder: Path, name: str) -> list[dict[str, float]]:
    """Return what a run has written about its steps and evaluations, without what it measured of time."""
    path = folder / "axonmpi-runs" / name / "metrics.jsonl"
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0].splitlines()  # the last one may be being written
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in complete]


def wait_for_steps(job: Job, folder: Path, name: str, steps: int = 5) -> None:
    """Wait until a run has made some steps."""
    job.wait(lambda: len(lines_of(folder, name)) > steps)


@pytest.fixture
def uninterrupted(cluster: Cluster, tmp_path: Path) -> list[dict[str, float]]:
    """Return the lines of a run on two nodes that nothing interrupts."""
    job = cluster.submit(
        "--ntasks-per-node=1", "--job-name=plain", TEMPLATES / "several_nodes_mpirun.sh", *RUN, folder=tmp_path
    )
    assert job.end() == "COMPLETED 0:0", job.output
    return lines_of(tmp_path, f"plain-{job.id}")


def test_a_job_that_a_more_urgent_one_displaces_goes_on_to_the_bit(tidy, uninterrupted, tmp_path):
    job = tidy.submit("--ntasks-per-node=1", TEMPLATES / "requeue.sh", *RUN, folder=tmp_path)
    name = f"axonmpi-{job.id}"
    wait_for_steps(job, tmp_path, name)
    urgent = tidy.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", folder=tmp_path)
    job.start_again()
    assert (urgent.end(), job.shown()["Restarts"]) == ("COMPLETED 0:0", "1")
    assert 5 < len(lines_of(tmp_path, name)) < STEPS
    assert job.end() == "COMPLETED 0:0", job.output
    assert lines_of(tmp_path, name) == uninterrupted
    assert "going on after step" in job.output


def test_a_task_whose_time_is_nearly_up_goes_on_and_the_others_stay_as_they_are(tidy, tmp_path):
    """Slurm looks at the limits twice a minute. The task whose job has the array's number is the one to stop."""
    options = ["--array=1-2", "--ntasks=1", "--time=10", "--signal=B:USR1@300"]
    array = tidy.submit(*options, TEMPLATES / "array.sh", *ENDLESS, folder=tmp_path)
    tasks = [array.task(number) for number in (1, 2)]
    for task in tasks:
        wait_for_steps(task, tmp_path, f"axonmpi-{task.id}")
    stopping = next(task for task in tasks if task.shown()["JobId"] == array.id)
    (other,) = set(tasks) - {stopping}
    tidy.checked("scontrol", "update", f"jobid={stopping.id}", "TimeLimit=5")
    stopping.start_again()
    assert (other.state, other.shown()["Restarts"]) == ("RUNNING", "0")
    made = len(lines_of(tmp_path, f"axonmpi-{stopping.id}"))
    stopping.wait(lambda: len(lines_of(tmp_path, f"axonmpi-{stopping.id}")) > made + 5)
    tidy.checked("scancel", array.id)
    rates = []
    for task in tasks:
        assert task.end().startswith("CANCELLED")
        lines = [line for line in lines_of(tmp_path, f"axonmpi-{task.id}") if "loss" in line]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        rates.append(lines[0]["learning_rate"])
    assert rates[1] == pytest.approx(1.5 * rates[0])  # 2e-3 and 3e-3
