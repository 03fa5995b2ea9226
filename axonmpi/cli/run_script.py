"""`axonmpi run`: a script for torchrun, unchanged, on the ranks of `mpirun` or `srun`.

    mpirun -n 4 axonmpi run train.py ARGUMENTS             sets torchrun's variables, and runs a script
    mpirun -n 4 axonmpi run --backend axonmpi train.py     the same; torch.distributed uses axonmpi
    mpirun -n 4 axonmpi run -m package.module ARGUMENTS    a module, as with `python -m`

An error, an exit code and `sys.argv` are those of the script alone: `python train.py`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..interop import launch_env
from ..interop.backend_override import override_backend
from ..utils.text import counted
from .arguments import parse_arguments
from .output import print_error_briefly, refuse

_BACKENDS = ("axonmpi", "gloo")


def main(argv: Sequence[str]) -> int:
    """Run a script or a module as `__main__` after MPI has started; collective over all ranks of the job.

    Returns:
        0 at the end of the script, 2 if there is none.

    Raises:
        SystemExit: The script raises it, or the options are wrong (code 2).
        LaunchError: The processes were not started as one MPI job.
    """
    options = parse_arguments(_parser(), argv)
    name, *arguments = options.module or options.script or [""]
    if not name:
        return refuse("axonmpi run", "expected a script, or -m and a module")
    if not options.module and not Path(name).exists():
        return refuse("axonmpi run", f"expected a script, got {name!r}, which does not exist")
    sys.excepthook = _print_error
    variables = launch_env()
    if options.backend is not None:
        override_backend(options.backend)
        if variables["RANK"] == "0":
            ranks = counted(int(variables["WORLD_SIZE"]), "rank")
            print(f"axonmpi run: {ranks}; torch.distributed uses {options.backend}", file=sys.stderr, flush=True)
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = str(Path.cwd() if options.module else Path(name).resolve().parent)
    if options.module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonmpi run",
        usage="axonmpi run [-h] [--backend {axonmpi,gloo}] SCRIPT [ARGUMENT ...]\n"
        "       axonmpi run [-h] [--backend {axonmpi,gloo}] -m MODULE [ARGUMENT ...]",
        description="Run a script for torchrun on the ranks of mpirun or srun, with RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID set.",
    )
    parser.add_argument(
        "--backend",
        choices=_BACKENDS,
        help="backend of all groups of torch.distributed, whatever the script names (default: what it names)",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="run a file")
    return parser


# ---- errors -----------------------------------------------------------------------------------------------------

_THIS_FILE, _RUNPY = (function.__code__.co_filename for function in (main, runpy.run_path))


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the script as Python does without this command, in place of `sys.excepthook`."""
    first = _first_of_script(trace)
    if first is None:
        print_error_briefly(kind, error, trace)
    else:
        sys.__excepthook__(kind, error.with_traceback(first), first)


def _first_of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on; None if the error is not the script's."""
    while trace is not None and _file_of(trace) != _THIS_FILE:
        trace = trace.tb_next
    trace = None if trace is None else trace.tb_next  # the frame that `main` has called
    if trace is None or _file_of(trace) != _RUNPY:
        return None
    while trace is not None and _file_of(trace) == _RUNPY:
        trace = trace.tb_next
    return trace


def _file_of(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
