"""`sbatch`, `srun` and `scontrol` for tests on a machine without Slurm: one node, and a job runs at once.

    fake_slurm.py sbatch [OPTIONS] SCRIPT [ARGUMENTS]     runs a copy of the script, with Slurm's variables
    fake_slurm.py srun [OPTIONS] COMMAND [ARGUMENTS]      runs the command on as many ranks, by way of mpirun
    fake_slurm.py srun --mpi=list                         lists the interfaces in FAKE_SLURM_MPI
    fake_slurm.py scontrol show hostnames                 names this machine

An option that it does not know is an error, as is an interface that the MPI library on PATH does not speak.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

JOB_ID = "1"
OPTIONS = (
    *(("--job-name", "-J"), ("--nodes", "-N"), ("--ntasks", "-n"), ("--cpus-per-task", "-c"), ("--time", "-t")),
    *(("--output", "-o"), ("--ntasks-per-node",)),
)
# Hydra and PRRTE would ask Slurm for the nodes of a job, and start their daemons with srun.
NO_SLURM_FOR_MPIRUN = {
    "HYDRA_BOOTSTRAP": "fork",
    "HYDRA_RMK": "user",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "^slurm",
}


def parser(program: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog=program, allow_abbrev=False, add_help=False)
    for names in OPTIONS:
        options.add_argument(*names)
    return options


def sbatch(argv: list[str]) -> int:
    options = parser("sbatch")
    options.add_argument("script", type=Path)
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    given = options.parse_args(argv)
    directives = parser("#SBATCH").parse_args(directives_of(given.script))
    settings = {**vars(directives), **{name: value for name, value in vars(given).items() if value is not None}}
    with tempfile.TemporaryDirectory(prefix="spool-") as spool:
        script = Path(spool, "slurm_script")  # Slurm runs a copy as well, so the script cannot look beside itself
        script.write_bytes(given.script.read_bytes())
        command = ["bash", str(script), *given.arguments]
        job = subprocess.run(command, env=variables(settings), capture_output=True, text=True, check=False)
    name = settings["job_name"] or given.script.name
    log = (settings["output"] or "slurm-%j.out").replace("%x", name).replace("%j", JOB_ID)
    Path(log).write_text(job.stdout + job.stderr)
    print(f"Submitted batch job {JOB_ID}")
    if job.returncode:
        sys.stderr.write(job.stdout + job.stderr)
    return job.returncode


def directives_of(script: Path) -> list[str]:
    """Return the options in the lines #SBATCH above the script's first command."""
    found = []
    for line in script.read_text().splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            found += shlex.split(line.removeprefix("#SBATCH "), comments=True)
    return found


def variables(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment of a job's script."""
    nodes = settings["nodes"] or "1"
    per_node = settings["ntasks_per_node"]
    tasks = settings["ntasks"] or (str(int(per_node) * int(nodes)) if per_node else None)
    told = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOBID": JOB_ID,
        "SLURM_JOB_NAME": settings["job_name"],
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NODELIST": platform.node(),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_CPUS_PER_TASK": settings["cpus_per_task"],
    }
    return {**os.environ, **NO_SLURM_FOR_MPIRUN, **{name: value for name, value in told.items() if value}}


def srun(argv: list[str]) -> int:
    offered = os.environ.get("FAKE_SLURM_MPI", "none pmi2 pmix").split()
    if argv == ["--mpi=list"]:
        sys.stderr.write("MPI plugin types are...\n" + "".join(f"\t{name}\n" for name in offered))
        return 0
    options = parser("srun")
    options.add_argument("--mpi", default="none", choices=offered)
    options.add_argument("--kill-on-bad-exit", "-K")
    options.add_argument("command", nargs=argparse.REMAINDER)
    given = options.parse_args(argv)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    spoken = "pmix" if "Open MPI" in version else "pmi2"
    if given.mpi != spoken:
        sys.stderr.write(f"srun: --mpi={given.mpi}, but the MPI library speaks {spoken}\n")
        return 1
    tasks = given.ntasks or os.environ.get("SLURM_NTASKS", "1")
    return subprocess.run(["mpirun", "-n", tasks, *given.command], env=job_step(), check=False).returncode


def job_step() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**kept, **NO_SLURM_FOR_MPIRUN}


def scontrol(argv: list[str]) -> int:
    if argv[:2] != ["show", "hostnames"]:
        sys.stderr.write(f"scontrol: only `scontrol show hostnames` is known here, got {argv}\n")
        return 1
    print(platform.node())
    return 0


COMMANDS = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
