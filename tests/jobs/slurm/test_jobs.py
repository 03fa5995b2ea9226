"""Jobs in a real Slurm: where their ranks are, how they end, and that nothing of them is left."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.fences import fences_of
from jobs.slurm.cluster import Job

TEMPLATES = REPOSITORY / "slurm"
PAGE = REPOSITORY / "docs/slurm.md"
SMALL = ["--data-limit", "0.2", "--held-out-sequences", "8", "--sample-length", "0", "--no-plot", "--device", "cpu"]
PROBE = Path(__file__).with_name("probe.py")


def own_script(template: str, folder: Path) -> Path:
    """Return a template in which the user's own program, the probe, stands for the trainer, as the page advises."""
    script = folder / template
    script.write_text((TEMPLATES / template).read_text().replace("axonmpi train", f"python {PROBE} train"))
    return script


def probed(job: Job) -> dict[str, list]:
    """Return what the probe has said."""
    assert job.end() == "COMPLETED 0:0", job.output
    return json.loads(next(line for line in job.output.splitlines() if line.startswith("{")))


@pytest.mark.parametrize(
    ("template", "options", "ranks_of_nodes"),
    [
        ("one_node.sh", [], [4]),
        ("several_nodes.sh", ["--ntasks-per-node=2", "--ntasks=3"], [2, 1]),
        ("several_nodes_mpirun.sh", ["--ntasks-per-node=2", "--ntasks=3"], [2, 1]),
    ],
)
def test_ranks_are_where_slurm_places_them(template, options, ranks_of_nodes, tidy, tmp_path):
    job = tidy.submit(*options, own_script(template, tmp_path), "--lr", "1", folder=tmp_path)
    said = probed(job)
    assert said["arguments"] == ["train", "--name", f"axonmpi-{job.id}", "--lr", "1"]
    assert [place[:3] for place in said["places"]] == [
        [node, local, f"n{node + 1}"] for node, ranks in enumerate(ranks_of_nodes) for local in range(ranks)
    ]
    assert job.shown()["NumNodes"] == str(len(ranks_of_nodes))


def test_each_rank_on_nodes_with_gpus_sees_those_of_its_node(tidy, tmp_path):
    script = own_script("gpu_nodes.sh", tmp_path)
    said = probed(tidy.submit("--gpus-per-node=2", "--ntasks-per-node=2", script, folder=tmp_path))
    assert [(place[2], place[3]) for place in said["places"]] == [(f"n{i}", "0,1") for i in (1, 1, 2, 2)]


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.glob("*.sh")))
def test_slurm_accepts_each_template(template, cluster):
    cluster.checked("sbatch", "--test-only", TEMPLATES / template)


def commands() -> list[str]:
    """Return the commands of the page that submit jobs."""
    return [line for fence in fences_of(PAGE) if fence.language == "sh" for line in fence.code.splitlines()]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_page_submit_jobs_that_train(line, tidy, tmp_path):
    (tmp_path / "slurm").symlink_to(TEMPLATES)
    job = tidy.submit(*shlex.split(line)[1:], *SMALL, folder=tmp_path)
    assert job.end() == "COMPLETED 0:0", job.output
    (summary,) = (tmp_path / "axonmpi-runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 5
    assert f"on {job.shown()['NumTasks']} ranks" in job.output


def test_the_test_suite_runs_as_a_job(tidy, tmp_path):
    options = ["--ntasks=2", f"--output={tmp_path}/out"]
    job = tidy.submit(*options, TEMPLATES / "tests.sh", "tests/conformance/test_bits.py", folder=REPOSITORY)
    assert job.end() == "COMPLETED 0:0", job.output
    assert re.search(r"\d passed", job.output)


@pytest.mark.parametrize(
    ("template", "codes"), [("several_nodes.sh", {"5:0", "137:0"}), ("several_nodes_mpirun.sh", {"5:0"})]
)
def test_a_job_in_which_a_rank_fails_is_a_failed_job(template, codes, tidy, tmp_path):
    """A code of srun is the largest of its ranks'; those that it kills have 137."""
    job = tidy.submit("--ntasks-per-node=1", own_script(template, tmp_path), "--fail", folder=tmp_path)
    assert job.end() in {f"FAILED {code}" for code in codes}, job.output
    assert "[rank 1] has ended with exit code 5" in job.output


@pytest.mark.parametrize("template", ["several_nodes.sh", "several_nodes_mpirun.sh"])
def test_a_cancelled_job_leaves_nothing(template, tidy, tmp_path):
    job = tidy.submit("--ntasks-per-node=1", TEMPLATES / template, "--steps=1000000", *SMALL, folder=tmp_path)
    job.wait(lambda: "held-out loss" in job.output)
    assert tidy.leftovers()
    tidy.checked("scancel", job.id)
    assert job.end().startswith("CANCELLED")
