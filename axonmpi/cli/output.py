"""Output of commands: printed once for all ranks, by rank 0, and never a traceback for a user's mistake."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from ..errors import LaunchError
from ..launch.exit import wait_for_first_report
from ..launch.launcher_variables import is_first_launched

BAD_USAGE = 2
"""The exit code for arguments that cannot be used."""


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
def printed_once() -> Iterator[None]:
    """Suppress the output of the `with` block on all ranks but rank 0; all ranks run the same block."""
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


def prepare_streams() -> None:
    """Make any text printable, also to an output that is closed or that lacks some characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open to the end
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def print_error_briefly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write one line, in place of `sys.excepthook`, about an error that is no fault of the program."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"{program_name()}: interrupted\n")
    elif issubclass(kind, LaunchError):
        sys.stderr.write(f"{program_name()}: error: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def program_name() -> str:
    """Return the name of the running command, such as `axonmpi train`."""
    return " ".join(["axonmpi", *sys.argv[1:2]])
