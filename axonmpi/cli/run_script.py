"""`axonmpi run`: a script for torchrun, unchanged, on the ranks of `mpirun` or `srun`.

    mpirun -n 4 axonmpi run train.py ARGUMENTS             sets torchrun's variables, and runs a script
    mpirun -n 4 axonmpi run --backend axonmpi train.py     the same; torch.distributed uses axonmpi
    mpirun -n 4 axonmpi run -m package.module ARGUMENTS    a module, as with `python -m`

An error, an exit code and `sys.argv` are those of the script alone: `python train.py`.
"""

from __future__ import annotations

import argparse
import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from ..interop import launch_env
from ..interop.backend_override import override_backend
from ..interop.environment import CPU_BACKENDS
from ..launch.launcher_variables import set_variables
from ..utils.text import counted
from .arguments import parse_arguments
from .output import print_error_briefly, refuse


def main(argv: Sequence[str]) -> int:
    """Run a script or a module as `__main__` after MPI has started; collective over all ranks of the job.

    Returns:
        0 at the end of the script, 2 if there is none.

    Raises:
        SystemExit: The script raises it, or the options are wrong (code 2).
        LaunchError: The processes were not started as one MPI job.
    """
    own, program = _split(argv)
    options = parse_arguments(_parser(), own)
    is_module = program[:1] == ["-m"]
    name, *arguments = program[is_module:] or [""]
    if not name:
        return refuse("axonmpi run", "expected a script, or -m and a module")
    if not is_module and not Path(name).exists():
        return refuse("axonmpi run", f"expected a script, got {name!r}, which does not exist")
    sys.excepthook = _print_error
    variables = launch_env()
    if options.backend is not None:
        override_backend(options.backend)
        set_variables({"ACCELERATE_USE_CPU": "true"})  # or it takes each rank without a GPU for the only one
        if variables["RANK"] == "0":
            ranks = counted(int(variables["WORLD_SIZE"]), "rank")
            print(f"axonmpi run: {ranks}; torch.distributed uses {options.backend}", file=sys.stderr, flush=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # as under torchrun
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = str(Path.cwd() if is_module else Path(name).resolve().parent)
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif Path(name).is_file():
        _run_file(Path(name).resolve())
    else:
        runpy.run_path(name, run_name="__main__")
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return this command's own options, and the program: a script or `-m` and a module, with its arguments."""
    own, program = [], list(argv)
    while program and program[0].startswith("-") and not program[0].startswith("-m") and program[0] != "--":
        own.append(program.pop(0))
        if own[-1] == "--backend":
            own += program[:1]
            program = program[1:]
    if program[:1] == ["--"]:
        return own, program[1:]
    if program and program[0].startswith("-m") and program[0] != "-m":
        program[:1] = ["-m", program[0].removeprefix("-m")]
    return own, program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonmpi run",
        usage="axonmpi run [-h] [--backend {axonmpi,gloo}] SCRIPT [ARGUMENT ...]\n"
        "       axonmpi run [-h] [--backend {axonmpi,gloo}] -m MODULE [ARGUMENT ...]",
        description="Run a script for torchrun on the ranks of mpirun or srun, with torchrun's variables set.",
    )
    parser.add_argument(
        "--backend",
        choices=CPU_BACKENDS,
        help="backend of all groups of torch.distributed, whatever the script names (default: what it names)",
    )
    return parser


def _run_file(file: Path) -> None:
    """Run a file as Python does: `__main__` stays to the end of the process, and `__file__` is absolute."""
    module = ModuleType("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"] = module
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))  # noqa: S102 - what a user asks for


# ---- errors -----------------------------------------------------------------------------------------------------

_THIS_FILE, _RUNPY = (function.__code__.co_filename for function in (main, runpy.run_path))


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the script as Python does without this command, in place of `sys.excepthook`."""
    while trace is not None and _file_of(trace) != _THIS_FILE:
        trace = trace.tb_next
    first = None if trace is None else trace.tb_next  # the frame that `main` has called
    if first is None or _file_of(first) not in (_THIS_FILE, _RUNPY):
        print_error_briefly(kind, error, trace)
        return
    while first is not None and _file_of(first) in (_THIS_FILE, _RUNPY):
        first = first.tb_next
    sys.__excepthook__(kind, error.with_traceback(first), first)


def _file_of(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
