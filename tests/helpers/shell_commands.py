"""Running the commands that the documentation and the Slurm templates consist of."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from axonmpi.launch.variables import without_launcher_variables

from . import fake_slurm

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a command ended; `output` has both of its streams."""

    code: int
    output: str


def command_environment(folder: Path) -> dict[str, str]:
    """Return variables under which commands find this interpreter's programs, `mpirun` and a stand-in for Slurm.

    Args:
        folder: An existing folder, for the stand-ins.
    """
    for name in fake_slurm.COMMANDS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake_slurm.__file__}" {name} "$@"\n')
        program.chmod(0o755)
    inherited = without_launcher_variables(os.environ)
    return {
        **{name: value for name, value in inherited.items() if not name.startswith(("SLURM_", "SBATCH_"))},
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), inherited["PATH"]]),
        # More ranks than cores, and root: what Open MPI asks for in tests only.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def run(command: list[str], folder: Path, env: dict[str, str], seconds: float = 150) -> Ended:
    """Run a command to its end, or end it with all of its processes when the time is up."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks with it
            output, _ = process.communicate(timeout=20)
            output += f"\n(ended after {seconds:g} s)"
    return Ended(process.returncode, output)
