"""The templates for Slurm start one job of as many ranks as they ask for, and hand the user's arguments on."""

import json
import re
import shlex
import shutil

import pytest
from helpers.shell_commands import REPOSITORY, command_environment, run

TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.sh"))
TWO_RANKS = {"one_node.sh": ["--ntasks=2"], "several_nodes.sh": ["--nodes=1", "--ntasks-per-node=2"]}
SMALL = ["--steps", "2", "--data-limit", "0.2", "--held-out-sequences", "8", "--sample-length", "0", "--no-plot"]

templates = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)


@pytest.fixture
def site(tmp_path):
    """A folder to submit jobs from, and the environment to do it in."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "here").mkdir()
    return tmp_path / "here", command_environment(tmp_path / "programs")


def submissions() -> list[str]:
    """Return the lines of the page's first commands, which submit each template."""
    page = (REPOSITORY / "docs/slurm.md").read_text()
    return page.partition("```sh\n")[2].partition("```")[0].splitlines()


@pytest.mark.parametrize("line", submissions())
def test_a_job_trains_on_ranks_that_see_each_other(line, site):
    folder, env = site
    (folder / "slurm").symlink_to(REPOSITORY / "slurm")
    ended = run([*shlex.split(line), *SMALL], folder, env)
    assert ended.code == 0, ended.output
    summary = json.loads((folder / "axonmpi-runs/axonmpi-1/summary.json").read_text())
    assert (summary["ranks"], summary["steps"]) == (2, 2)
    assert "on 2 ranks" in (folder / "axonmpi-1.out").read_text()


def test_the_page_submits_each_template():
    assert sorted(re.findall(r"slurm/(\S+)", "\n".join(submissions()))) == [path.name for path in TEMPLATES]


@templates
def test_a_job_whose_ranks_fail_is_a_failed_job(template, site):
    folder, env = site
    program = folder.parent / "programs/axonmpi"
    program.write_text('#!/bin/sh\necho "called: $*"\nexit 5\n')
    program.chmod(0o755)
    ended = run(["sbatch", *TWO_RANKS[template.name], str(template), "--lr", "1"], folder, env)
    assert ended.code != 0
    assert "called: train --name axonmpi-1 --lr 1" in ended.output


@pytest.fixture
def choices(site):
    """Return a function that tells which interface several_nodes.sh chooses of those that srun offers."""
    folder, env = site
    # One srun that lists and one that says how it was called, so that no ranks are needed.
    real = shutil.which("srun", path=env["PATH"])
    programs = folder.parent / "recorder"
    programs.mkdir()
    recorder = programs / "srun"
    recorder.write_text(f'#!/bin/sh\n[ "$*" = --mpi=list ] && exec "{real}" "$@"\necho "called: $*"\n')
    recorder.chmod(0o755)

    def choose(vendor: str, offered: str, **variables: str):
        python = programs / "python"
        python.write_text(f'#!/bin/sh\necho "{vendor}"\n')
        python.chmod(0o755)
        given = {"PATH": f"{programs}:{env['PATH']}", "FAKE_SLURM_MPI": offered, **variables}
        job = run(["sbatch", str(REPOSITORY / "slurm/several_nodes.sh"), "--lr", "1"], folder, env | given)
        return job, (folder / "axonmpi-1.out").read_text()

    return choose


@pytest.mark.parametrize(
    ("vendor", "offered", "expected"),
    [
        ("Open MPI", "none pmi2 pmix", "pmix"),
        ("MPICH", "none pmix pmi2", "pmi2"),
        ("Intel MPI", "none pmi2 pmix pmix_v4", "pmi2"),
        ("Cray MPICH", "none cray_shasta pmi2", "cray_shasta"),
    ],
)
def test_srun_speaks_the_protocol_of_the_library(choices, vendor, offered, expected):
    job, printed = choices(vendor, offered)
    assert job.code == 0, job.output
    assert f"called: --mpi={expected} --cpus-per-task=2 " in printed
    assert "axonmpi train --name axonmpi-1 --lr 1" in printed


def test_the_user_can_choose_the_protocol(choices):
    _, printed = choices("Open MPI", "none", SRUN_MPI="pmix_v5")
    assert "called: --mpi=pmix_v5 " in printed


@pytest.mark.parametrize(("vendor", "spoken", "offered"), [("Open MPI", "pmix", "pmi2"), ("MPICH", "pmi2", "pmix")])
def test_no_protocol_in_common_is_said(choices, vendor, spoken, offered):
    job, printed = choices(vendor, f"none {offered}")
    assert job.code == 1
    assert f"{vendor} speaks {spoken}, and srun offers none of these" in printed
    assert "called:" not in printed
