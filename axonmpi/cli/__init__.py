"""The `axonmpi` command: chooses a subcommand and hands it the rest of the arguments (layer 7).

    mpirun -n 4 axonmpi train --steps 500
                        └─ axonmpi.cli.train.main(["--steps", "500"]) -> exit code

A subcommand is a module of this package with `main(argv) -> int`, imported when it is asked for. Every rank runs
the command, so every rank refuses a bad one, with exit code 2 and before MPI starts; only rank 0 prints help.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
from collections.abc import Callable, Sequence

from ..environment import detect_launchers

__all__ = ["main"]

_COMMANDS = {
    "train": "train a small GPT on text, on any number of ranks",
    "bench": "measure collectives and every kind of parallelism on this machine",
    "chart": "draw a pipeline schedule: which rank does what, and when it waits",
    "doctor": "say what is wrong with the installation or the launch",
}
BAD_USAGE = 2
"""The exit code for arguments that cannot be used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None means those of this process.

    Returns:
        The exit code: 0, or 2 for a command that does not exist, or what the subcommand returns.

    Raises:
        SystemExit: A subcommand refuses its arguments (code 2), or has shown its help (code 0).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in _COMMANDS:
        run: Callable[[Sequence[str]], int] = importlib.import_module(f".{name}", __name__).main
        if argv is None:
            # What imports have made stays to the end, so collections need not look through it, nor does the exit.
            gc.freeze()
        return run(arguments[1:])
    if name in ("-h", "--help", "help"):
        print_on_first_rank(_usage())
        return 0
    if name == "--version":
        print_on_first_rank(_version())
        return 0
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f": did you mean {near[0]}?" if near else f": expected one of {', '.join(_COMMANDS)}"
    return refuse("axonmpi", (f"unknown command {name!r}" if name else "no command given") + hint)


def refuse(program: str, message: str) -> int:
    """Print an error on this rank, as one write so that ranks do not mix, and return the exit code of bad usage."""
    sys.stderr.write(f"{program}: error: {message}\n")
    sys.stderr.flush()
    return BAD_USAGE


def print_on_first_rank(text: str) -> None:
    """Print on rank 0 only."""
    if is_first_rank():
        print(text, flush=True)


def is_first_rank() -> bool:
    """Say whether this is rank 0, as the launcher numbers the ranks: MPI has not started."""
    launchers = detect_launchers()
    return not launchers or not launchers[0].rank


def _usage() -> str:
    lines = [f"  {name:8} {text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: axonmpi COMMAND [FLAGS]            on one rank",
            "       mpirun -n 4 axonmpi COMMAND ...    on four",
            "",
            *lines,
            "",
            "axonmpi COMMAND --help shows the flags of a command.",
        ]
    )


def _version() -> str:
    from importlib.metadata import version

    return f"axonmpi {version('axonmpi')}"
