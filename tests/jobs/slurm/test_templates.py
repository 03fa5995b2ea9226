"""What the templates for Slurm do by themselves: which programs they call, how, and what they make of their ends.

This needs no Slurm: `mpirun`, `srun`, `scontrol` and others are small programs here, which say how they are
called.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.fences import fences_of
from helpers.limits import limit

TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.sh"))
REQUEUED = [path for path in TEMPLATES if "#SBATCH --requeue" in path.read_text()]
STARTED = {"tests.sh": "pytest -q"}
"""What a template starts on its ranks, where that is not the trainer."""
SECONDS = 20

PROGRAM = """\
#!/bin/sh
echo "called: ${0##*/} $*"
"""
RANKS = """\
#!{python} -S
import os, signal, sys
print("called: mpirun", *sys.argv[1:], flush=True)
def end(*_):
    sys.exit(int(os.environ["SIGNALLED"]))
if "SIGNALLED" in os.environ:
    signal.signal(signal.SIGUSR1, end)
    print("ready", flush=True)
    signal.pause()
sys.exit(int(os.environ.get("CODE", "0")))
"""
"""Stands for mpirun: ends with CODE, or where SIGNALLED is set with that, once it gets the signal USR1."""

templates = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
requeued = pytest.mark.parametrize("template", REQUEUED, ids=lambda template: template.name)


@dataclass
class Site:
    """A folder with programs; what Slurm would set for one of the tasks of an array is set."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        program = self.folder / name
        program.write_text(text)
        program.chmod(0o755)

    def start(self, template: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(template), *arguments],
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, template: Path, *arguments: str, **variables: str) -> tuple[int, str]:
        with self.start(template, *arguments, **variables) as job:
            output, _ = job.communicate(timeout=limit(SECONDS))
        return job.returncode, output


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    for name, program in {
        **dict.fromkeys(("axonmpi", "apptainer", "scontrol"), PROGRAM),
        "srun": '#!/bin/sh\n[ "$*" = --mpi=list ] && exec echo "$OFFERED" >&2\n' + PROGRAM,
        "python": '#!/bin/sh\necho "$VENDOR"\n',
        "mpirun": RANKS.format(python=sys.executable),
    }.items():
        made.add(name, program)
    made.variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "axonmpi",
        "SLURM_NTASKS": "4",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_ARRAY_JOB_ID": "16",
        "SLURM_ARRAY_TASK_ID": "3",
        "OFFERED": "none pmi2 pmix",
        "VENDOR": "MPICH",
    }
    return made


@templates
def test_a_template_is_valid_and_says_what_each_option_is_for(template):
    subprocess.run(["bash", "-n", str(template)], check=True)
    above = ""
    for line in template.read_text().splitlines():
        if line.startswith("#SBATCH "):
            assert above.startswith("#"), f"no comment above {line}"
        above = line


@templates
def test_a_template_starts_its_ranks_with_the_arguments_behind_its_name(template, site):
    code, output = site.run(template, "--lr", "1 e")
    assert code == 0, output
    (call,) = [line for line in output.splitlines() if line.startswith(("called: mpirun", "called: srun"))]
    assert STARTED.get(template.name, "axonmpi train") in call
    assert call.endswith("--lr 1 e")
    assert call.startswith("called: mpirun -n 4") or "--cpus-per-task=2" in call


@templates
def test_runs_do_not_share_a_folder(template, site):
    _, output = site.run(template)
    name = "axonmpi-16_3" if template.name == "array.sh" else "axonmpi-17"
    assert template.name in STARTED or f"--name {name}" in " ".join(output.split()), output


@templates
def test_a_job_whose_ranks_fail_ends_with_their_code(template, site):
    site.add("srun", '#!/bin/sh\nexit "$CODE"\n')
    code, output = site.run(template, CODE="5", SRUN_MPI="pmi2")
    assert (code, "called: scontrol" in output) == (5, False), output


# ---- going back into the queue --------------------------------------------------------------------------------


def own_requeue(template: Path) -> str:
    return f"called: scontrol requeue {'16_3' if template.name == 'array.sh' else '17'}\n"


@requeued
def test_ranks_that_stopped_in_time_are_requeued(template, site):
    code, output = site.run(template, CODE="85")
    assert (code, output.endswith(own_requeue(template))) == (85, True), output


@requeued
@pytest.mark.parametrize(("ranks", "comes_back"), [(85, True), (138, True), (0, False)])
def test_the_signal_reaches_the_ranks(template, site, ranks, comes_back):
    """With 138 a rank has died of it, as one does that was still starting."""
    with site.start(template, SIGNALLED=str(ranks)) as job:
        assert job.stdout is not None
        while "ready" not in job.stdout.readline():
            assert job.poll() is None
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=limit(SECONDS))
    assert (job.returncode, output == own_requeue(template)) == (ranks, comes_back), output


# ---- several_nodes.sh: the protocol of srun -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "offered", "expected"),
    [
        ("Open MPI", "none pmi2 pmix", "pmix"),
        ("MPICH", "none pmix pmi2", "pmi2"),
        ("Intel MPI", "none pmi2 pmix pmix_v4", "pmi2"),
        ("Cray MPICH", "none cray_shasta pmi2", "cray_shasta"),
    ],
)
def test_srun_speaks_the_protocol_of_the_library(site, vendor, offered, expected):
    code, output = site.run(REPOSITORY / "slurm/several_nodes.sh", VENDOR=vendor, OFFERED=offered)
    assert (code, f"called: srun --mpi={expected} " in output) == (0, True), output


def test_the_user_can_choose_the_protocol(site):
    _, output = site.run(REPOSITORY / "slurm/several_nodes.sh", OFFERED="none", SRUN_MPI="pmix_v5")
    assert "called: srun --mpi=pmix_v5 " in output


@pytest.mark.parametrize(("vendor", "spoken", "offered"), [("Open MPI", "pmix", "pmi2"), ("MPICH", "pmi2", "pmix")])
def test_no_protocol_in_common_is_said(site, vendor, spoken, offered):
    code, output = site.run(REPOSITORY / "slurm/several_nodes.sh", VENDOR=vendor, OFFERED=f"none {offered}")
    said = f"{vendor} speaks {spoken}, and srun offers none of these"
    assert (code, said in output, "called:" in output) == (1, True, False), output


# ---- the page -------------------------------------------------------------------------------------------------


def test_the_page_names_each_template():
    rows = [line for line in (REPOSITORY / "docs/slurm.md").read_text().splitlines() if line.startswith("| `")]
    named = [row.split("`")[1] for row in rows]
    assert [name for name in named if name.endswith(".sh")] == [path.name for path in TEMPLATES]
    assert fences_of(REPOSITORY / "docs/slurm.md")
