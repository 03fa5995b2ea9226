"""Counts what tests start: a line in the file $COUNTS for each import of torch and each job.

Python imports this by itself in each process where this folder is on PYTHONPATH.
"""

import os
import sys

LAUNCHERS = {"mpirun", "mpiexec", "srun", "sbatch"}
_file = os.environ.get("COUNTS")


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import" and arguments[0] == "torch":
        _write("import of torch")
    elif event == "subprocess.Popen" and isinstance(arguments[1], list):
        words = {os.path.basename(os.fsdecode(word)) for word in arguments[1]}  # nsenter ... mpirun ...
        if LAUNCHERS & words and "--version" not in words:
            _write("job")


def _write(what: str) -> None:
    with open(_file, "a") as file:
        file.write(f"{what}\n")


if _file:
    sys.addaudithook(_count)
