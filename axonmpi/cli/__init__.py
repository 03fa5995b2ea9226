"""The `axonmpi` command: chooses a subcommand and passes it the remaining arguments.

    mpirun -n 4 axonmpi train --steps 500
                        └─ axonmpi.cli.train.main(["--steps", "500"]) -> exit code

Each subcommand is a module of this package with `main(argv) -> int`, imported only when it runs: `doctor` and `why`
work without the packages that `train` needs. `output.py` and `arguments.py` are shared by all; no other package
imports this one. Every rank parses its arguments, so every rank refuses bad ones, with exit code 2 and before MPI
starts. Output that is the same on all ranks is printed by rank 0.
"""

from __future__ import annotations

import difflib
import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from types import ModuleType

from .output import prepare_streams, print_error_briefly, print_on_first_rank, program_name, refuse

__all__ = ["main"]

_COMMANDS: dict[str, tuple[str, Callable[[], ModuleType]]] = {
    "train": (
        "train a small GPT on text, on any number of ranks",
        lambda: import_module("axonmpi.cli.train"),
    ),
    "run": (
        "run a script for torchrun on the ranks of mpirun or srun",
        lambda: import_module("axonmpi.cli.run_script"),
    ),
    "bench": (
        "measure collectives and every kind of parallelism on this machine",
        lambda: import_module("axonmpi.cli.bench"),
    ),
    "chart": (
        "draw a pipeline schedule: which rank does what, and when it waits",
        lambda: import_module("axonmpi.cli.chart"),
    ),
    "checkpoint": (
        "look at, check and convert checkpoints",
        lambda: import_module("axonmpi.cli.checkpoint"),
    ),
    "doctor": (
        "say what is wrong with the installation or the launch",
        lambda: import_module("axonmpi.cli.doctor"),
    ),
    "why": (
        "say who waits for whom in a job that runs or hangs",
        lambda: import_module("axonmpi.cli.why"),
    ),
    "trace": (
        "say where the time of all ranks went, from a trace",
        lambda: import_module("axonmpi.cli.trace"),
    ),
    "top": (
        "show where the ranks of a job are, live",
        lambda: import_module("axonmpi.cli.top"),
    ),
}
"""For each command a line of help, and a function that imports its module, and no other one."""
_USAGE = """\
usage: axonmpi COMMAND [FLAGS]            on one rank
       mpirun -n 4 axonmpi COMMAND ...    on four

{commands}

axonmpi COMMAND --help shows the flags of a command."""
_OUTPUT_CLOSED = 141
"""The exit code that a shell shows for a program whose output is no longer read, as before `| head`."""
_OUTPUT_FULL = 1
_EXTRA = ("matplotlib", "rich", "tyro", "yaml")
"""Packages of the extra `train`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None means those of this process.

    Returns:
        The exit code: 0, or 2 for a command that does not exist, or the subcommand's.

    Raises:
        SystemExit: A subcommand refuses its arguments (code 2) or has shown its help (code 0); the output cannot be
            written (code 1), or is no longer read (code 141).
    """
    if argv is not None:
        return _run(list(argv))
    if sys.argv[1:2] == ["run"]:
        return _run(sys.argv[1:])  # output and errors are a script's
    prepare_streams()
    sys.excepthook = print_error_briefly
    try:
        try:
            return _run(sys.argv[1:], freeze=True)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit tries to write once more
        if error.errno == errno.EPIPE:
            raise SystemExit(_OUTPUT_CLOSED) from None
        sys.stderr.write(f"{program_name()}: error: cannot write the output: {error.strerror}\n")
        raise SystemExit(_OUTPUT_FULL) from None


def _run(arguments: Sequence[str], *, freeze: bool = False) -> int:
    name = arguments[0] if arguments else ""
    if name in _COMMANDS:
        return _run_command(name, arguments[1:], freeze)
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:10} {text}" for name, (text, _) in _COMMANDS.items())
        print_on_first_rank(_USAGE.format(commands=commands))
        return 0
    if name == "--version":
        print_on_first_rank(f"axonmpi {metadata.version('axonmpi')}")
        return 0
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f": did you mean {near[0]}?" if near else f": expected one of {', '.join(_COMMANDS)}"
    return refuse("axonmpi", (f"unknown command {name!r}" if name else "no command given") + hint)


def _run_command(name: str, arguments: Sequence[str], freeze: bool) -> int:
    _, load = _COMMANDS[name]
    try:
        run: Callable[[Sequence[str]], int] = load().main
        if freeze:
            gc.freeze()  # imported objects stay to the end: collections, also the last one, can leave them out
        return run(arguments)
    except ModuleNotFoundError as error:
        if name == "run" or error.name not in _EXTRA:  # a script's own import
            raise
        return refuse(f"axonmpi {name}", f"{error.name} is not installed: pip install 'axonmpi[train]'")
