"""The `axonmpi` command: chooses a subcommand and hands it the rest of the arguments.

    mpirun -n 4 axonmpi train --steps 500
                        └─ axonmpi.cli.train.main(["--steps", "500"]) -> exit code

A subcommand is a module of this package with `main(argv) -> int`, imported on demand. Every rank runs the
command, so every rank refuses a bad one, with exit code 2 and before MPI starts. Output that is the same on all
ranks is printed by rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from types import TracebackType

from ..errors import LaunchError
from ..launch.exit import wait_for_first_report
from ..launch.launcher_variables import is_first_launched

__all__ = ["main"]

_COMMANDS = {
    "train": "train a small GPT on text, on any number of ranks",
    "bench": "measure collectives and every kind of parallelism on this machine",
    "chart": "draw a pipeline schedule: which rank does what, and when it waits",
    "checkpoint": "look at, check and convert checkpoints",
    "doctor": "say what is wrong with the installation or the launch",
    "why": "say who waits for whom in a job that runs or hangs",
    "top": "show where the ranks of a job are, live",
}
_USAGE = """\
usage: axonmpi COMMAND [FLAGS]            on one rank
       mpirun -n 4 axonmpi COMMAND ...    on four

{commands}

axonmpi COMMAND --help shows the flags of a command."""
BAD_USAGE = 2
"""The exit code for arguments that cannot be used."""
_NOBODY_READS = 141
"""The exit code that a shell shows for a program whose output nobody reads any more, as before `| head`."""
_NOT_WRITTEN = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None means those of this process.

    Returns:
        The exit code: 0, or 2 for a command that does not exist, or what the subcommand returns.

    Raises:
        SystemExit: A subcommand refuses its arguments (code 2) or has shown its help (code 0); the output cannot be
            written (code 1), or nobody reads it (code 141).
    """
    if argv is not None:
        return _run(list(argv))
    _prepare_streams()
    sys.excepthook = _say_briefly
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
            raise SystemExit(_NOBODY_READS) from None
        sys.stderr.write(f"{_program()}: error: cannot write the output: {error.strerror}\n")
        raise SystemExit(_NOT_WRITTEN) from None


def _run(arguments: Sequence[str], *, freeze: bool = False) -> int:
    name = arguments[0] if arguments else ""
    if name in _COMMANDS:
        run: Callable[[Sequence[str]], int] = importlib.import_module(f".{name}", __name__).main
        if freeze:
            gc.freeze()  # imported objects stay to the end: collections, also the last one, can leave them out
        return run(arguments[1:])
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:10} {text}" for name, text in _COMMANDS.items())
        print_on_first_rank(_USAGE.format(commands=commands))
        return 0
    if name == "--version":
        print_on_first_rank(f"axonmpi {metadata.version('axonmpi')}")
        return 0
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f": did you mean {near[0]}?" if near else f": expected one of {', '.join(_COMMANDS)}"
    return refuse("axonmpi", (f"unknown command {name!r}" if name else "no command given") + hint)


# ---- what commands print ----------------------------------------------------------------------------------------


def refuse(program: str, message: str) -> int:
    """Print an error that all ranks have found, on rank 0, and return the exit code of bad usage."""
    if is_first_launched():
        sys.stderr.write(f"{program}: error: {message}\n")
        sys.stderr.flush()
    else:
        wait_for_first_report()
    return BAD_USAGE


def print_on_first_rank(text: str) -> None:
    """Print on rank 0 only."""
    if is_first_launched():
        print(text, flush=True)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Print the output of the block on rank 0 only; all ranks do the same in it."""
    if is_first_launched():
        yield
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    except SystemExit as end:
        if end.code:
            wait_for_first_report()
        raise


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; on bad options or after help every rank ends as with argparse, and rank 0 prints."""
    with said_once():
        return parser.parse_args(argv)


def positive(text: str) -> int:
    """Read an option's value, a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


# ---- how commands end -------------------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Make any text printable, also to an output that is closed or that lacks some characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open to the end
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _say_briefly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write one line, in place of `sys.excepthook`, about an error that is no fault of the program."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"{_program()}: interrupted\n")
    elif issubclass(kind, LaunchError):
        sys.stderr.write(f"{_program()}: error: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _program() -> str:
    return " ".join(["axonmpi", *sys.argv[1:2]])
